"""Every command of the README and the guide does its work, as it is written there, in a folder with
one small run.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lanes import sample
from tests.runs import ROOT, environment

PAGES = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/guide.md")]
STARTS = (
    r"(source |\./(run_train\.sh|scripts/)|[A-Z]+=\S+ |titanlite[ .][a-z]"
    r"|python |hf |sbatch |torchrun |srun |--help )"
)


def commands(page: str) -> set[str]:
    """Return the commands of a page's code blocks and inline code, `ls|verify` as one for each."""
    blocks = re.findall(r"^```\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    spans = re.findall(
        r"`([^`]+)`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    )
    lines = [
        line.partition("   ")[0].removeprefix("$ ")
        for block in blocks
        for line in block.splitlines()
    ]
    found = {" ".join(line.split()) for line in (*lines, *spans) if re.match(STARTS, line)}
    found = {re.sub("^--help", "./run_train.sh --help", line) for line in found}
    return {
        line.replace(word, choice)
        for line in found
        for word in line.split()[-1:]
        for choice in word.split("|")
    }


@dataclass(frozen=True)
class Check:
    """What proves that a command did its work; `more` is typed behind it, to be shorter or where
    the README has …
    """

    proof: str
    more: str = ""
    code: int = 0


SHORT = (
    "--training.steps 24 --lr_scheduler.warmup_steps 4 --validation.steps 2 --checkpoint.interval 8"
)
CHECKS = {
    "./run_train.sh": Check(
        r"titanlite: step 24 reached", f"{SHORT} --checkpoint.last_save_in_hf"
    ),  # not 300 steps
    "./run_train.sh --config mine.toml --training.steps 1000 --optimizer.lr 1e-3": Check(
        "step 60 reached", "--training.steps 60"
    ),
    "./run_train.sh --training.stepz 5 --optimizer.lr x "
    "--parallelism.tensor_parallel_degree 3": Check(
        r"3 configuration errors; nothing was started(.*\n)+.*did you mean training\.steps\?",
        code=2,
    ),
    "NGPU=1 ./run_train.sh --config cluster.toml": Check(
        "no effect on 1 rank: parallelism.fsdp_forward_prefetch(.*\n)+.*step 2 reached"
    ),
    "./run_train.sh --config llama_8b.toml": Check(  # neither its tokenizer nor its text is here
        r"can't train llama3 8B here with this config; nothing was started\n"
        r"  model\.hf_assets_path",
        code=2,
    ),
    "./run_train.sh --help": Check(r"optimizer\.lr "),
    "./run_train.sh --help optimizer": Check(r"optimizer\.lr "),
    "titanlite models": Check("llama3(.*\n)+.*405B"),
    "titanlite config --placements --config llama_70b.toml": Check(
        r"layers\.\*\.attention\.wq\.weight .*over tp"
    ),
    "titanlite plan --config llama_8b.toml --world 8 --gpu h100-80g": Check("^It fits:"),
    "titanlite plan": Check("^It fits:", "--config mine.toml --world 2 --gpu h100-80g"),
    "titanlite data prepare": Check(
        r"to train on them: (.*\n)+vocabulary 256, tokenizer bytes",
        "my-text --out shards --workers 1 && titanlite data show shards",
    ),
    "titanlite checkpoint ls": Check(r"(step-\d+ .*complete\n){2}", "outputs"),
    "titanlite checkpoint verify": Check("step-24: verified", "outputs"),
    "titanlite checkpoint show": Check(
        r"step 24\b(.*\n)+.*model\.layers\.0\.attention\.wq\.weight", "outputs"
    ),
    "titanlite checkpoint diff": Check(
        r"tensors differ", "outputs/checkpoint/step-16 outputs", code=1
    ),
    "titanlite checkpoint cp": Check("step-24 is now in copied/step-24: ", "outputs copied"),
    "titanlite checkpoint export": Check("config.json", "outputs exported && ls exported"),
    "titanlite checkpoint import": Check(
        r"imported \d+ tensors: imported/step-0", "outputs/checkpoint/hf-step-24 imported"
    ),
    "titanlite checkpoint rm": Check("removed .*step-8", "outputs/checkpoint/step-8"),
    "titanlite generate": Check(r"titanlite: outputs/checkpoint/step-24.*\ndef __init__\(self, "),
    "titanlite evaluate": Check(r"bits per byte +\d\.\d+", "--steps 2"),  # not all windows
    "titanlite top outputs": Check(r"step 24 of 24(.*\n)+ +loss +\d(.*\n)+ +1 +ended +24 "),
    "titanlite report outputs": Check("wrote outputs/report.html"),
    "titanlite plot outputs": Check(r"outputs +24 .*\nwrote outputs/curves.html"),
    "titanlite doctor": Check(r"\nnetwork    all-reduce over dp_shard 2: "),
    "titanlite profile": Check(r"(?s)a profile takes 8 steps.*the step +[\d.]+ +100\.0%"),
    "titanlite verify --model llama3": Check(
        "the row equals one process", "--only 2"
    ),  # not all rows
    "titanlite tour": Check("   proved: its logits are within "),  # the last step
    'titanlite.load("outputs")': Check("Llama ByteTokenizer"),
}
ELSEWHERE = {
    "./scripts/test.sh": "runs this test",
    "./scripts/first_light.sh": "tests/gpu/test_first_light.py",
    "python scripts/count.py": "tests/test_house.py counts by it",
    'hf download REPO --include "tokenizer*" --local-dir DIR': (
        "needs a network, and is a command of huggingface_hub"
    ),
    "sbatch scripts/slurm/train.slurm --config mine.toml": "needs SLURM",
    "source .venv/bin/activate": "tests/launch/test_environment.py",
    "srun python -m titanlite.train …": "tests/launch/test_launch.py::test_srun_can_start_workers",
    "titanlite init my_model": "tests/tools/test_init.py",
    "torchrun … -m titanlite.train …": (
        "tests/launch/test_launch.py::test_torchrun_can_start_workers"
    ),
}


def test_every_command_of_the_readme_is_run_by_a_test():
    assert set().union(*map(commands, PAGES)) == CHECKS.keys() | ELSEWHERE.keys()


def test_the_readme_is_a_landing_page():
    assert len(PAGES[0].splitlines()) <= 120


def test_a_page_says_how_titanlite_becomes_a_command_before_its_first_one():
    tutorials = [ROOT / f"docs/tutorial-{name}.md" for name in ("own-text", "new-model", "cluster")]
    for page in (PAGES[0], *(path.read_text(encoding="utf-8") for path in tutorials)):
        first = re.search(r"(?m)`titanlite [a-z]|^titanlite ", page)
        assert first and "source .venv/bin/activate" in page[: first.start()]


SMALL = """
[model.overrides]
dim = 16
n_layers = 1
n_heads = 2
n_kv_heads = 1
hidden_dim = 32

[training]
dataset = "text"
dataset_path = "my-text"
seq_len = 16
local_batch_size = 1
steps = 2
"""


def shell(command: str, folder: Path) -> tuple[int, str]:
    variables = environment(TMPDIR=str(folder))
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    done = subprocess.run(
        command, shell=True, cwd=folder, env=variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[Path, tuple[int, str]]:
    """A folder in which the default run, made shorter, has run: the folder, and what the run
    returned.
    """
    folder = tmp_path_factory.mktemp("readme")
    (folder / "run_train.sh").write_text(f'#!/bin/sh\nexec "{ROOT}/run_train.sh" "$@"\n')
    (folder / "run_train.sh").chmod(0o755)
    (folder / "my-text").mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / "my-text" / name).write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (folder / "mine.toml").write_text(f'job.dump_folder = "mine"\n{SMALL}')
    (folder / "cluster.toml").write_text(
        f'job.dump_folder = "cluster"\nparallelism.fsdp_forward_prefetch = 2\n{SMALL}'
    )
    return folder, shell(f"./run_train.sh {CHECKS['./run_train.sh'].more}", folder)


TAKE_MINUTES = {
    "./run_train.sh --config mine.toml --training.steps 1000 --optimizer.lr 1e-3",
    "NGPU=1 ./run_train.sh --config cluster.toml",
    "titanlite profile",
    "titanlite verify --model llama3",
    "titanlite tour",
}


@pytest.mark.parametrize("command", sample(CHECKS, long=CHECKS.keys() - TAKE_MINUTES))
def test_a_command_of_the_readme_does_its_work(command, first):
    folder, (code, out) = first
    check = CHECKS[command]
    if command.startswith("titanlite.load"):
        (folder / "load.py").write_text(
            f"import titanlite\nfound = {command}\nprint(*(type(x).__name__ for x in found))"
        )
        code, out = shell("python load.py", folder)
    elif command != "./run_train.sh":
        code, out = shell(f"{command} {check.more}", folder)
    assert code == check.code and re.search(check.proof, out, re.MULTILINE), out
