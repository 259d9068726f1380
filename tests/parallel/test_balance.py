"""The balance of experts: counts, biases and auxiliary loss of a step are those of one process, on
any mesh.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.jobs import FLOAT64, MOE, forward_backward, full, relative_error, trainer
from tests.lanes import sample
from titanlite.data.loader import MicroBatch
from titanlite.parallel.dtensor import local_part
from titanlite.parallel.expert_parallel import routers
from titanlite.train.trainer import Trainer

STEPS = [
    *MOE,
    *FLOAT64,
    "--training.global_batch_size=12",
    "--training.steps=3",
    "--metrics.log_freq=2",
]
STEPS += ["--lr_scheduler.warmup_steps=0", "--optimizer.lr=0.01", "--optimizer.eps=1e-3"]
DEGREE = "--parallelism.{}_parallel_degree=2"
EP, TP, CP, PP = (DEGREE.format(name) for name in ("expert", "tensor", "context", "pipeline"))
SPLIT_BACKWARD = (
    "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble --model.overrides.n_layers=4"
)
WAYS = {
    "dp2": (2, 6, ""),
    "tp2": (2, 12, TP),
    "cp2": (2, 12, CP),
    "accumulation": (1, 4, ""),
    "recompute": (1, 12, "--activation_checkpoint.mode=full"),
    "recompute by operation": (1, 12, "--activation_checkpoint.mode=selective"),
    "compiled": (
        1,
        12,
        "--compile.enable --compile.backend=aot_eager --activation_checkpoint.mode=full",
    ),
    "ep2, accumulation, recompute": (2, 2, f"{EP} --activation_checkpoint.mode=selective"),
    "ep2 of tp2": (2, 12, f"{EP} {TP}"),
    "ep4 of dp2 x tp2": (4, 3, f"{EP.replace('=2', '=4')} {TP} --activation_checkpoint.mode=full"),
    "ep4 of dp2 x cp2": (4, 3, f"{EP.replace('=2', '=4')} {CP}"),
    "frozen router": (2, 6, f"{EP} --model.freeze=['layers.*.router.weight']"),
    "frozen experts": (2, 12, f"{EP} {TP} --model.freeze=['layers.*.experts.*']"),
    "pp2": (2, 12, f"{PP} --activation_checkpoint.mode=full"),
    "pp2, split backward": (2, 12, f"{PP} {SPLIT_BACKWARD}"),
}
BIAS = '--model.overrides.balance="bias"'
BALANCES = "bias", "sequence"
SAMPLE = [
    ("bias", "ep2, accumulation, recompute"),
    ("sequence", "tp2"),
    ("sequence", "accumulation"),
]


def steps(argv: list[str], folder: str) -> dict[str, Any]:
    """Train; return the counts of each step over the ranks of this stage, what was recorded, and
    all weights.
    """
    run = trainer(argv, folder)
    end_step, write, counted, records = (
        run.runner.balance.end_step,
        run.report._write,
        list[Any](),
        list[Any](),
    )

    def end_and_keep(skipped: torch.Tensor) -> None:
        counts = {name: router.counts.clone() for name, router in routers(*run.parts).items()}
        for count in counts.values():
            dist.all_reduce(count, group=run.mesh.stage)
        counted.append({name: count.tolist() for name, count in counts.items()})
        end_step(skipped)
        assert not any(
            router.counts.any() or router.auxiliary for router in routers(*run.parts).values()
        )

    def write_and_keep(step: int, values: dict[str, Any], tags: dict[str, float]) -> None:
        keys = ("expert_load_max", "experts_idle", "auxiliary_loss")
        records.append({key: values[key] for key in ("loss", *keys)})
        assert all(tags[f"moe/{key}"] == values[key] for key in keys)
        write(step, values, tags)

    run.runner.balance.end_step = end_and_keep  # type: ignore[method-assign]
    run.report._write = write_and_keep  # type: ignore[method-assign]
    run.train()
    return {
        "counted": counted,
        "records": records,
        "weights": {n: full(t) for n, t in run.state.weights().items()},
    }


@pytest.mark.parametrize(
    ("balance", "way"), sample([(b, way) for way in WAYS for b in BALANCES], *SAMPLE, every=5)
)
def test_a_step_s_balance_is_that_of_one_process(pool, tmp_path, balance, way):
    """Of every rank: biases and weights; counts and what is logged of all of its stages."""
    world, local_batch, options = WAYS[way]
    argv = [
        *STEPS,
        f'--model.overrides.balance="{balance}"',
        *[o for o in options.split() if o.startswith("--model")],
    ]
    expected = pool.run(
        steps, [*argv, "--training.local_batch_size=12"], str(tmp_path / "one"), world=1
    )[0]
    argv += [*options.split(), f"--training.local_batch_size={local_batch}"]
    ranks = pool.run(steps, argv, str(tmp_path / "many"), world=world)
    tokens = 12 * 16 * 2  # each has two experts
    assert all(sum(counts) == tokens for step in expected["counted"] for counts in step.values())
    for rank in ranks:
        for found, wanted in zip(rank["counted"], expected["counted"], strict=True):
            assert found == {name: wanted[name] for name in found}
        for found, wanted in zip(rank["records"], expected["records"], strict=True):
            found, wanted = (dict(record) for record in (found, wanted))
            loss = found.pop("loss"), wanted.pop("loss")
            assert found == pytest.approx(wanted, rel=1e-10), found
            assert loss[0] == pytest.approx(loss[1], rel=1e-10)
        for name, weight in rank["weights"].items():
            assert relative_error(weight, expected["weights"][name]) <= 1e-10, name
    for name in expected["counted"][0]:
        bias = expected["weights"].get(f"model.{name}.bias")
        counts = torch.tensor([step[name] for step in expected["counted"]], dtype=torch.float64)
        moves = (counts.mean(-1, keepdim=True) - counts).sign()  # one for each step
        centered = (moves - moves.mean(-1, keepdim=True)).sum(0) * 1e-3
        assert (bias is None) == (balance == "sequence") and counts.unique().numel() > 2
        assert bias is None or (
            bias.dtype == torch.float32 and torch.allclose(bias.double(), centered, atol=1e-8)
        )
    assert all(
        (record["auxiliary_loss"] > 0) == (balance == "sequence") for record in expected["records"]
    )
    for record, step in zip(expected["records"], expected["counted"], strict=True):
        loads = [max(counts) * len(counts) / tokens for counts in step.values()]
        assert record["expert_load_max"] == pytest.approx(max(loads)), "of the layer with the worst"


def one_step(run: Trainer, poison: bool = False) -> dict[str, torch.Tensor]:
    """Take a step, with `poison` one with a gradient that is not a number; return the biases after
    it.
    """
    run.step += 1
    labels = torch.randint(256, (2, 16))
    forward_backward(run, [MicroBatch(torch.stack([labels, labels], dim=1))])
    if poison:
        full_gradient = run.runner.parameters[0].grad
        assert full_gradient is not None
        local_part(full_gradient).fill_(torch.nan)
    run.runner.update(run.step, run.runner.clip_gradients())
    return {name: router.bias.clone() for name, router in routers(*run.parts).items()}


def good_and_bad_step(argv: list[str], folder: str) -> tuple[Any, Any]:
    run = trainer(argv, folder)
    return one_step(run), one_step(run, poison=dist.get_rank() == 0)


def test_a_step_that_is_not_finite_moves_no_bias(pool, tmp_path):
    """The good one moves them by as much up as down, though of 5 experts no half has more tokens
    than the mean.
    """
    argv = [*MOE, BIAS, "--model.overrides.experts=5"]
    for good, bad in pool.run(good_and_bad_step, argv, str(tmp_path), world=2):
        assert all(bias.any() and torch.equal(bias, bad[name]) for name, bias in good.items())
        assert all(bias.double().mean().abs() < 1e-9 for bias in good.values())


def validate_and_generate(argv: list[str], folder: str) -> list[float]:
    """Return what the routers have counted after a validation and a sample."""
    run = trainer(argv, folder)
    run.report.clock.restart()
    run.validate()
    run.show_sample()
    return [
        int(router.counts.sum()) + float(router.auxiliary)
        for router in routers(*run.parts).values()
    ]


def test_validation_and_generation_do_not_count(pool, tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 5)
    argv = [
        *MOE,
        "--validation.enable",
        "--validation.dataset=text",
        f"--validation.dataset_path={tmp_path}",
    ]
    argv += ["--validation.freq=1", "--validation.steps=1", "--generate.tokens=2"]
    assert pool.run(validate_and_generate, argv, str(tmp_path / "run"), world=1) == [[0, 0]]
