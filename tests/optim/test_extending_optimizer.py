"""The optimizer on the page docs/extending.md trains, on a mesh too, resumes, and its state can be narrow."""

import re
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import FLOAT64, TINY, job, relative_error, trainer, weights
from titanlite.config.load import ConfigError
from titanlite.optim import optimizer_bytes
from titanlite.parallel.dtensor import local_part

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
SIGNS = ["--model.package=signs", "--optimizer.name=Signs"]


@pytest.fixture
def package(tmp_path, monkeypatch) -> None:
    """The page's files, where Python finds them here and on the pool's ranks."""
    for name, code in re.findall(r"```python\n# (signs/\S+)\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))


def trained(argv: list[str], folder: str, path: str) -> dict[str, torch.Tensor]:
    import sys

    sys.path.insert(0, path)
    run = trainer(argv, folder)
    run.train()
    held = sum(local_part(value).nbytes for name, value in run.state.tensors().items() if "optimizer" in name)
    assert held == optimizer_bytes(run.trained, run.job.config)
    return weights(run)


def test_it_trains_on_every_mesh_as_in_one_process(pool, tmp_path, package):
    argv = [*TINY, *SIGNS, *FLOAT64, "--training.global_batch_size=4"]
    where = str(tmp_path / "run"), str(tmp_path)
    alone = pool.run(trained, [*argv, "--training.local_batch_size=4"], *where, world=1)[0]
    for found in pool.run(trained, argv, *where, world=2):
        assert all(relative_error(found[name], weight) < 1e-10 for name, weight in alone.items())


def test_it_resumes_with_narrow_state(pool, tmp_path, package):
    argv = [*SAVING, *SIGNS, "--optimizer.state_dtype=bfloat16"]
    pool.run(trained, argv, str(tmp_path / "straight"), str(tmp_path), world=1)
    straight = pool.run(run_until, [*argv, "--training.steps=4"], str(tmp_path / "straight"), world=1)[0]
    pool.run(run_until, argv, str(tmp_path / "cut"), 1, world=1)
    then = pool.run(run_until, [*argv, "--training.steps=4"], str(tmp_path / "cut"), world=1)[0]
    assert then["state"] == straight["state"] and "optimizer.norm.weight.momentum" in then["state"]


def test_names_and_keys_that_mean_nothing_are_refused(package):
    assert job([*TINY, *SIGNS], 1).config.optimizer.name == "Signs"
    with pytest.raises(ConfigError, match="Signs does not use this key"):
        job([*TINY, *SIGNS, "--optimizer.eps=0.1"], 1)
    with pytest.raises(ConfigError, match='no optimizer is registered as "Sings"; did you mean Signs.*AdamW, Muon'):
        job([*TINY, *SIGNS, "--optimizer.name=Sings"], 1)
    with pytest.raises(ConfigError, match="did you mean AdamW"):
        job([*TINY, "--optimizer.name=AdanW"], 1)
