"""The example optimizer of docs/extending.md trains on a mesh, resumes, and can keep its state in
bfloat16.
"""

import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import FLOAT64, TINY, job, relative_error, trainer, weights
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.optim import optimizer_bytes
from titanlite.parallel.dtensor import local_part
from titanlite.train.summary import describe_start
from titanlite.verify.command import table
from titanlite.verify.model_under_test import read_model

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
SIGNS = ["--model.package=signs", "--optimizer.name=Signs"]


@pytest.fixture
def package(tmp_path, monkeypatch) -> None:
    """Write the page's files to a folder on the import path."""
    for name, code in re.findall(r"```python\n# (signs/\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))


def trained(argv: list[str], folder: str, path: str) -> dict[str, torch.Tensor]:
    import sys

    sys.path.insert(0, path)
    run = trainer(argv, folder)
    assert any("  Signs, weight decay" in line for line in describe_start(run)), (
        "it has no implementation to name"
    )
    run.train()
    size = sum(
        local_part(value).nbytes
        for name, value in run.state.tensors().items()
        if "optimizer" in name
    )
    assert size == optimizer_bytes(run.trained, run.job.config)
    return weights(run)


def test_training_on_two_ranks_equals_one_process(pool, tmp_path, package):
    argv = [*TINY, *SIGNS, *FLOAT64, "--training.global_batch_size=4"]
    folders = str(tmp_path / "run"), str(tmp_path)
    expected = pool.run(trained, [*argv, "--training.local_batch_size=4"], *folders, world=1)[0]
    for weights_of_rank in pool.run(trained, argv, *folders, world=2):
        assert all(
            relative_error(weights_of_rank[name], weight) < 1e-10
            for name, weight in expected.items()
        )


@pytest.mark.long
def test_it_resumes_with_state_in_bfloat16(pool, tmp_path, package):
    argv = [*SAVING, *SIGNS, "--optimizer.state_dtype=bfloat16"]
    pool.run(trained, argv, str(tmp_path / "straight"), str(tmp_path), world=1)
    uninterrupted = pool.run(
        run_until, [*argv, "--training.steps=4"], str(tmp_path / "straight"), world=1
    )[0]
    pool.run(run_until, argv, str(tmp_path / "cut"), 1, world=1)
    resumed = pool.run(run_until, [*argv, "--training.steps=4"], str(tmp_path / "cut"), world=1)[0]
    assert (
        resumed["state"] == uninterrupted["state"]
        and "optimizer.norm.weight.momentum" in resumed["state"]
    )


def test_unknown_names_and_unused_keys_are_refused(package):
    assert job([*TINY, *SIGNS], 1).config.optimizer.name == "Signs"
    with pytest.raises(ConfigError, match="Signs does not use this key"):
        job([*TINY, *SIGNS, "--optimizer.eps=0.1"], 1)
    with pytest.raises(
        ConfigError, match='no optimizer is registered as "Sings"; did you mean Signs.*AdamW, Muon'
    ):
        job([*TINY, *SIGNS, "--optimizer.name=Sings"], 1)
    with pytest.raises(ConfigError, match="did you mean AdamW"):
        job([*TINY, "--optimizer.name=AdanW"], 1)


@pytest.mark.long
@pytest.mark.parametrize(
    "is_local", [False, True], ids=["elementwise", "by the norm of the rank's part"]
)
def test_verify_proves_it_and_names_what_is_not_that_of_one_process(
    tmp_path, package, capsys, is_local
):
    if is_local:
        file = tmp_path / "signs" / "algorithm.py"
        norm = 'state["momentum"].sign() / local_part(state["momentum"]).norm()'
        code = file.read_text().replace('state["momentum"].sign()', norm)
        file.write_text(f"from titanlite.parallel.dtensor import local_part\n{code}")
    rows = table(read_model(SIGNS, {}))
    eager = [
        n
        for n, row in rows.items()
        if (row.layout, row.precision, row.compile) == ("dp2", "float64", "off")
    ]
    assert main(["verify", *SIGNS, f"--only=#{eager[0]}"]) == is_local
    printed = " ".join(capsys.readouterr().out.split())
    assert "verify: llama3 debugmodel with Signs, 1 row" in printed
    if is_local:
        assert "1 of 1 rows FAILED" in printed and "after 3 Signs steps: " in printed


def test_verify_takes_no_other_key_of_an_optimizer(package):
    with pytest.raises(
        ConfigError, match=r"optimizer.lr.*\n.*keys of \[model\] and \[lora\], and optimizer.name"
    ):
        read_model([*SIGNS, "--optimizer.lr=1"], {})
    with pytest.raises(UserError, match="did you mean Signs"):
        read_model([*SIGNS, "--optimizer.name=Sings"], {})
