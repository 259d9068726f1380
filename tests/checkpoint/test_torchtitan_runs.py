"""The judge: TorchTitan 0.2.2's own trainer, before a switch to titanlite and after one back."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import QUIET, job
from tests.lanes import sample
from tests.runs import ROOT, environment, records
from tests.stores.server import free_port
from titanlite import cli
from titanlite.data.loader import build_loader
from titanlite.data.shuffle import RankSlice
from titanlite.data.tokenizer import open_tokenizer
from titanlite.data.windows import training_data

pytestmark = pytest.mark.skipif(
    find_spec("torchtitan") is None, reason="needs torchtitan==0.2.2, which the extra dev has"
)

Losses = dict[int, tuple[float, float, float]]
"""Loss, gradient norm and learning rate by step."""
ARGV = [*QUIET, "--debug.seed=7", "--optimizer.no_decay=[]", "--checkpoint.enable"]
ARGV += """--training.seq_len=32 --training.steps=14 --training.local_batch_size=4
    --training.global_batch_size=8 --lr_scheduler.total_steps=20 --lr_scheduler.warmup_steps=2
    --parallelism.pipeline_parallel_microbatch_size=4 --optimizer.lr=1e-3 --metrics.log_freq=1
    --checkpoint.no_initial_load_model_only""".split()
SIZES = "dim=32 n_layers=2 n_heads=4 n_kv_heads=2 vocab_size=256 rope_theta=10000.0 "
QWEN = SIZES + "head_dim=16 hidden_dim=64 "
KINDS = {
    "llama3": ("llama3", "debugmodel", SIZES + "hidden_dim=88 rope_scaling={}"),
    "moe": ("qwen3", "debugmodel_moe", QWEN + "expert_dim=16 experts=4 top_k=2 balance=none"),
    "tied": ("qwen3", "debugmodel", QWEN + "tied=true"),
}
TP, PP = "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"
MESHES: dict[str, list[list[str]]] = {
    "llama3": [[], [], [TP, PP]],
    "moe": [[], [TP], [TP, "--parallelism.expert_parallel_degree=2"]],
    "tied": [[PP]],
}
"""Of 1, 2 and 4 ranks; FSDP is on what is left."""


@pytest.fixture(scope="module")
def titan(tmp_path_factory) -> Iterator[Callable[..., Losses]]:
    """Trains there, from a sample on; returns what `losses` does."""
    folder = tmp_path_factory.mktemp("titan")
    given = job(ARGV, 1)
    data = training_data(given, open_tokenizer(given), 7)
    loader = build_loader(data, RankSlice(0, 1, 8, 1), 0, 20, given.config.training.dataloader)
    torch.save(torch.cat([torch.as_tensor(rows) for rows in loader]), folder / "rows")
    paths = os.pathsep.join([f"{ROOT}", *sys.path])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.titan"],
            env={**environment(), "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=folder,
        )
    yield partial(train_there, process, folder)
    process.communicate()


def train_there(
    process: Any, home: Path, kind: str, folder: Path, ranks: int, first: int, *argv: str
) -> Losses:
    words = {"kind": kind, "folder": f"{folder}", "ranks": ranks, "first": first, "argv": argv}
    words |= {"port": free_port(), "rows": f"{home / 'rows'}"}
    print(json.dumps(words), file=process.stdin, flush=True)
    codes = process.stdout.readline()
    assert codes == f"codes {[0] * ranks}\n", codes + (home / "log").read_text()
    lines = map(json.loads, (folder / "losses.jsonl").read_text().splitlines())
    return {each["step"]: (each["loss"], each["norm"], each["lr"]) for each in lines}


def require_equal(found: Losses, wanted: Losses, steps: range) -> None:
    assert [*found] == [*steps]
    for step, values in found.items():
        print(step, *values, "there:", *wanted[step])
        assert values[:2] == pytest.approx(wanted[step][:2], abs=2e-6)
        assert values[2] == pytest.approx(wanted[step][2], rel=1e-12)


@pytest.mark.parametrize("kind", sample(KINDS, long=["llama3", "moe"], nightly=["tied"]))
def test_a_run_goes_on_here_as_it_would_there_and_back_there_again(titan, train, tmp_path, kind):
    # torch 2.14's FSDP2 refuses TorchTitan's tie.
    there = titan(kind, tmp_path / "there", 1 if kind == "tied" else 2, 0)
    model, flavor, sizes = KINDS[kind]
    argv = [*ARGV, f"--model.name={model}", f"--model.flavor={flavor}"]
    argv += [f"--model.overrides.{size}" for size in sizes.split()]
    argv += [f"--checkpoint.initial_load_path={tmp_path}/there/checkpoint/step-8"]
    for number, mesh in enumerate(MESHES[kind]):
        ranks = 2 if kind == "tied" else 2**number
        here = tmp_path / f"here-{ranks}"
        train([*argv, *mesh], here, ranks=ranks)
        logged = [each for each in records(here) if "loss" in each]
        ours = {each["step"]: (each["loss"], each["grad_norm"], each["lr"]) for each in logged}
        require_equal(ours, there, range(9, 15))
    back, last = tmp_path / "back", f"{tmp_path}/here-{2 if kind == 'tied' else 4}"
    assert cli.main(["checkpoint", "export", last, f"{back}", "--format", "torchtitan"]) == 0
    words = f"--checkpoint.initial_load_path={back} --checkpoint.no-initial-load-model-only"
    words += " --checkpoint.exclude_from_loading=dataloader"
    again = titan(kind, tmp_path / "again", 1, 14 * 8, *words.split())
    require_equal(again, there, range(15, 21))
