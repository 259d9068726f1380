"""Every command of the README and the guide does its work, as it is written there, in a folder with
one small run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


PROOFS = r"""
$ ./run_train.sh
+ --training.steps 24 --lr_scheduler.warmup_steps 4 --validation.steps 2 --checkpoint.interval 8
+ --checkpoint.last_save_in_hf
= titanlite: step 24 reached
$ ./run_train.sh --config mine.toml --training.steps 1000 --optimizer.lr 1e-3
+ --training.steps 60
= step 60 reached
$ ./run_train.sh --training.stepz 5 --optimizer.lr x --parallelism.tensor_parallel_degree 3
= 3 configuration errors; nothing was started(.*\n)+.*did you mean training\.steps\?
! 2
$ NGPU=1 ./run_train.sh --config cluster.toml
= no effect on 1 rank: parallelism.fsdp_forward_prefetch(.*\n)+.*step 2 reached
$ ./run_train.sh --config llama_8b.toml
= can't train llama3 8B here with this config; nothing was started\n  model\.hf_assets_path
! 2
$ ./run_train.sh --help
= optimizer\.lr\b
$ ./run_train.sh --help optimizer
= optimizer\.lr\b
$ titanlite models
= llama3(.*\n)+.*405B
$ titanlite config --placements --config llama_70b.toml
= layers\.\*\.attention\.wq\.weight .*over tp
$ titanlite plan --config llama_8b.toml --world 8 --gpu h100-80g
= ^It fits:
$ titanlite plan
+ --config mine.toml --world 2 --gpu h100-80g
= ^It fits:
$ titanlite data prepare
+ my-text --out shards --workers 1 && titanlite data show shards
= to train on them: (.*\n)+vocabulary 256, tokenizer bytes
$ titanlite checkpoint ls
+ outputs
= (step-\d+ .*complete\n){2}
$ titanlite checkpoint verify
+ outputs
= step-24: verified
$ titanlite checkpoint show
+ outputs
= step 24\b(.*\n)+.*model\.layers\.0\.attention\.wq\.weight
$ titanlite checkpoint diff
+ outputs/checkpoint/step-16 outputs
= tensors differ
! 1
$ titanlite checkpoint cp
+ outputs copied
= step-24 is now in copied/checkpoint/step-24:
$ titanlite checkpoint export
+ outputs exported && ls exported
= config.json
$ titanlite checkpoint import
+ outputs/checkpoint/hf-step-24 imported
= imported \d+ tensors: imported/step-0
$ titanlite generate
= titanlite: outputs/checkpoint/step-24.*\ndef __init__\(self,
$ titanlite evaluate
+ --steps 2
= bits per byte +\d\.\d+
$ titanlite top outputs
= step 24 of 24(.*\n)+ +loss +\d(.*\n)+ +1 +ended +24
$ titanlite report outputs
= wrote outputs/report.html
$ titanlite plot outputs
= outputs +24 (.*\n)+loss\noutputs  
$ titanlite doctor
= \nnetwork    all-reduce over dp_shard 2:
$ titanlite profile
= (?s)a profile takes 8 steps.*the step +[\d.]+ +100\.0%
$ titanlite verify --model llama3
+ --only 2
= the row equals one process
$ titanlite tour
+ --to 'a folder with blanks'
= checked: its logits are within
$ titanlite.load("outputs")
= Llama ByteTokenizer
"""
"""Each command, what is typed behind it, to be shorter or where the page has …, what proves by its
output that it did its work, and its exit code, if not 0. Of llama_8b.toml neither the tokenizer nor
the text is here.
"""
CHECKS = {
    found["command"]: found
    for found in re.finditer(
        r"^\$ (?P<command>.*)(?P<more>(\n\+ .*)*)\n= (?P<proof>.*)(\n! (?P<code>.*))?$",
        PROOFS,
        re.MULTILINE,
    )
}


def typed(command: str) -> str:
    return (command + CHECKS[command]["more"]).replace("\n+", "")


ELSEWHERE = {
    "./scripts/test.sh": "runs this test",
    "./scripts/first_light.sh": "tests/gpu/test_first_light.py",
    "python scripts/count.py": "tests/test_house.py counts by it",
    'hf download REPO --include "tokenizer*" --local-dir DIR': (
        "needs a network, and is a command of huggingface_hub"
    ),
    "sbatch --nodes 32 scripts/slurm/train.slurm --config llama_70b.toml": (
        "tests/multinode/test_slurm.py"
    ),
    "sbatch scripts/slurm/train.slurm --config mine.toml": "tests/multinode/test_slurm.py",
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
    return folder, shell(typed("./run_train.sh"), folder)


@pytest.mark.nightly
@pytest.mark.parametrize("command", CHECKS)
def test_a_command_of_the_readme_does_its_work(command, first):
    folder, (code, out) = first
    check = CHECKS[command]
    if command.startswith("titanlite.load"):
        names = "print(*(type(each).__name__ for each in found))"
        (folder / "load.py").write_text(f"import titanlite\nfound = {command}\n{names}")
        code, out = shell("python load.py", folder)
    elif command != "./run_train.sh":
        code, out = shell(typed(command), folder)
    assert code == int(check["code"] or 0) and re.search(check["proof"], out, re.MULTILINE), out
