"""The example optimizer of docs/extending.md trains on a mesh, resumes, and can keep its state in
bfloat16.
"""

import sys

import pytest
import torch

from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import FLOAT64, TINY, job, require_close, trainer, weights
from tests.lanes import sample
from tests.messages import refused, says
from tests.optim.test_bf16_state import optimizer_state
from tests.runs import write_example
from titanlite.cli import main
from titanlite.train.summary import describe_start
from titanlite.verify.command import table
from titanlite.verify.model_under_test import read_model

SIGNS = ["--model.package=signs", "--optimizer.name=Signs"]


@pytest.fixture
def package(tmp_path, monkeypatch) -> None:
    """Write the page's files to a folder on the import path."""
    write_example("signs", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def trained(argv: list[str], folder: str, path: str) -> dict[str, torch.Tensor]:
    sys.path.insert(0, path)
    run = trainer(argv, folder)
    (line,) = [line for line in describe_start(run) if " Signs, " in line]
    assert "fused" not in line and "foreach" not in line, "it has no implementation to name"
    run.train()
    assert optimizer_state(run)
    return weights(run)


def test_training_on_two_ranks_equals_one_process(pool, tmp_path, package):
    argv = [*TINY, *SIGNS, *FLOAT64, "--training.global_batch_size=4"]
    folders = str(tmp_path / "run"), str(tmp_path)
    one = [*argv, "--training.local_batch_size=4"]
    (expected,) = pool.run(trained, one, *folders, world=1)
    for found in pool.run(trained, argv, *folders, world=2):
        require_close(found, expected, 1e-10)


@pytest.mark.long
def test_it_resumes_with_state_in_bfloat16(pool, tmp_path, package):
    argv = [*SAVING, *SIGNS, "--optimizer.state_dtype=bfloat16", "--training.steps=4"]
    folder = str(tmp_path / "cut")
    pool.run(trained, [*argv, "--training.steps=1"], folder, str(tmp_path), world=1)
    resumed = pool.run(run_until, argv, folder, world=1)[0]["state"]
    straight = pool.run(run_until, argv, str(tmp_path / "straight"), world=1)[0]["state"]
    assert resumed == straight and "optimizer.norm.weight.momentum" in resumed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([*SIGNS, "--optimizer.eps=0.1"], ["optimizer.eps", "Signs"]),
        ([*SIGNS, "--optimizer.name=Sings"], ["optimizer.name", "Sings", "Signs", "AdamW, Muon"]),
        (["--optimizer.name=AdanW"], ["optimizer.name", "AdanW", "mean AdamW"]),
    ],
)
def test_unknown_names_and_unused_keys_are_refused(package, options, named):
    with refused(*named):
        job([*TINY, *options], 1)


def test_verify_takes_no_other_key_of_an_optimizer(package):
    with refused("optimizer.lr", "optimizer.name"):
        read_model([*SIGNS, "--optimizer.lr=1"], {})
    with refused("Sings", "mean Signs"):
        read_model([*SIGNS, "--optimizer.name=Sings"], {})


@pytest.mark.parametrize("is_local", sample([False, True], nightly=[True]))
def test_verify_proves_it_and_names_what_is_not_that_of_one_process(
    tmp_path, package, capsys, is_local
):
    """A step by the norm of the rank's part is not."""
    if is_local:
        file = tmp_path / "signs" / "algorithm.py"
        sign = 'state["momentum"].sign()'
        code = file.read_text().replace(sign, f'{sign} / local_part(state["momentum"]).norm()')
        file.write_text(f"from titanlite.parallel.dtensor import local_part\n{code}")
    plain = ("dp2", "float64", "off")
    rows = table(read_model(SIGNS, {})).items()
    number = next(n for n, r in rows if (r.layout, r.precision, r.compile) == plain)
    assert main(["verify", *SIGNS, f"--only=#{number}"]) == is_local
    printed = " ".join(capsys.readouterr().out.split())
    says(printed, "llama3 debugmodel", "Signs", *["FAILED", "3 Signs steps"] * is_local)
