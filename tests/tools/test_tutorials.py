"""The tutorials do what they say: their files are written and their commands run, in order, as they
stand there, with fewer steps.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tools.test_readme import ROOT, shell

SHORT = " ".join(
    """--training.steps 4 --training.local_batch_size 1 --training.global_batch_size 2
    --training.seq_len 32 --lr_scheduler.warmup_steps 1 --validation.steps 1
    --checkpoint.interval 2 --generate.no_at_end""".split()
)
PROOFS = {
    "own-text": r"shard: shards|run/checkpoint/step-4|\nThe ",
    "fine-tuning": r"step-0, .*\n(.*\n){3}Paris\.\n|⟦That is Paris, on the Seine\.<.im_end.>⟧|"
    r"step-80, .*\n(.*\n){3}That is Paris, on the Seine\.\n|"
    r"step-80, .*\n(.*\n){3}That is Vienna, on the Danube\.\n|exported step 80: adapters|"
    r"assistant\nThat is Rome, on the Tiber\.<.im_end.>",
    "new-model": r"layers\.\*\.scale|1 passed",
    "cluster": "4 reached|resumed step 4 |step 6 reached|It fits: |step 8 reached|wrote curves",
}
"""What the commands of a page print, in order."""


def script(page: str) -> str:
    """Return a page's blocks as one script, in order: files, and commands with runs as short as can
    be.
    """
    lines = ["set -e", "export NGPU=1"]
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        name, _, text = block.partition("\n")
        lines.append(f"cat > {name[2:]} <<'END'\n{text}END" if kind else block)
    text = "\n".join([*lines, "wait"])
    if "ask.py" in page:  # its runs are short, and must learn
        return text
    text = re.sub(r"(titanlite train [^&\n]*)", rf"\1 {SHORT} ", text)
    for steps, fewer in {"40": 6, "60": 8}.items():  # a later run goes further
        text = re.sub(f"steps {steps} +--training.steps 4", f"steps {fewer}", text)
    return text


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROOFS)
def test_the_commands_of_a_tutorial_do_their_work(name, tmp_path):
    page = (ROOT / f"docs/tutorial-{name}.md").read_text(encoding="utf-8")
    if "import AutoModel" in page:
        pytest.importorskip("transformers")
    (tmp_path / "my-text").mkdir()
    for path in ("my-text/a.txt", "held-out.txt"):
        (tmp_path / path).write_text("The quick brown fox jumps over the lazy dog. " * 99)
    code, out = shell(script(page), tmp_path)
    assert code == 0, out
    rest = out
    for proof in PROOFS[name].split("|"):
        found = re.search(proof, rest)
        assert found, f"{proof} is missing, or not in its place:\n{out}"
        rest = rest[found.end() :]


@pytest.mark.long
def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path):
    if not find_spec("material"):
        pytest.skip("the extra docs is not installed: no mkdocs-material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.stem for path in Path(ROOT, "docs").glob("*.md")}
    assert pages <= {path.name for path in tmp_path.iterdir()}
