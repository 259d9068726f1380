"""Rows of a table: a model on some ranks with some options, whose numbers are those of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.saved import run_until
from tests.jobs import (
    FLOAT64,
    MOE,
    QUIET,
    TINY,
    fake_world,
    forward_backward,
    full,
    job,
    micro_batches,
    relative_error,
    trainer,
    validated,
)
from tests.runs import records
from titanlite.config.pipeline_order import parse
from titanlite.data.loader import MicroBatch
from titanlite.data.packing import IGNORED
from titanlite.parallel.build import Context, build_model, named_parameters
from titanlite.parallel.context_parallel import own_positions
from titanlite.parallel.expert_parallel import routers
from titanlite.parallel.init import allocate
from titanlite.parallel.parallelize import parallelize
from titanlite.parallel.pipeline_parallel import Pipeline, orders
from titanlite.runtime.page import OWN_PAGE
from titanlite.runtime.torch_private import compiled_graphs
from titanlite.train.forward import take
from titanlite.train.generate import generate
from titanlite.train.loss import count_valid, model_loss
from titanlite.train.report import loss_over_ranks
from titanlite.train.trainer import Trainer
from titanlite.verify.pool import Pool

SAMPLES = 12
IS_OLD = TorchVersion(torch.__version__) < "2.13"
"""torch 2.11 runs no autograd.Function in a split backward pass."""
SGD = [
    f"--optimizer.{word}"
    for word in "name=SGD lr=0.1 weight_decay=0 implementation=for-loop".split()
]
SGD.append("--lr_scheduler.warmup_steps=0")
"""The cheapest: DTensor searches for seconds how other operations are split on three dimensions."""
GPT2 = [
    *QUIET,
    "--model.name=gpt2",
    *(f"--model.overrides.{field}" for field in "dim=16 n_layers=2 n_heads=2".split()),
]
EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]
FOUR = [*EVEN, "--model.overrides.n_layers=4"]
LORA = [*EVEN, "--lora.rank=3", "--lora.alpha=12", "--optimizer.lr=0.01"]
MODELS = {
    "llama": TINY,
    "even": EVEN,
    "odd": [*EVEN, "--model.overrides.hidden_dim=9"],
    "four": FOUR,
    # Softmax ignores what a key's bias adds to all its scores: its gradient is zero but for
    # rounding.
    "gpt2": [
        *GPT2,
        "--model.overrides.n_layers=4",
        "--model.overrides.dropout=0.0",
        '--model.freeze=["*.wk.bias"]',
    ],
    "experts": MOE,
}
PP, TP, CP, EP, HSDP = (
    f"--parallelism.{key}_degree=2"
    for key in (
        "pipeline_parallel",
        "tensor_parallel",
        "context_parallel",
        "expert_parallel",
        "data_parallel_replicate",
    )
)
PP4, EP4 = (option.replace("=2", "=4") for option in (PP, EP))
ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
UNBALANCED = "--parallelism.context_parallel_load_balancer=none"
SCHEDULE = "--parallelism.pipeline_parallel_schedule="
ZBV, INTERLEAVED = (f"{SCHEDULE}{name}" for name in ("ZBVZeroBubble", "Interleaved1F1B"))
SMALL = "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.0.*','*norm.weight']"
DEFERRED, RESHARD = (
    "--parallelism.defer_gradient_sync=",
    "--parallelism.fsdp_reshard_after_forward=",
)
PREFETCH = "--parallelism.fsdp_forward_prefetch=1 --parallelism.fsdp_backward_prefetch=2"
GROUPED = "--parallelism.fsdp_blocks_per_group=2"
OFFLOADED = "--training.enable_cpu_offload"
CHUNKS = "--training.loss_chunks="
RECOMPUTED = "--activation_checkpoint.mode="
FULL = f"{RECOMPUTED}full"
BY_OPERATION = f"{RECOMPUTED}selective --activation_checkpoint.selective_ac_option=op"
COMPILED = "--compile.enable --compile.backend=aot_eager"
FREEZE = "--model.freeze="
FROZEN_EXPERTS = f"{FREEZE}['layers.0.moe.experts.*','layers.1.moe.experts.w2']"
FROZEN_ENDS = f"{FREEZE}['tok_embeddings.*','layers.2.*','norm.*']"
FROZEN_STAGE = f"{FREEZE}['tok_embeddings.*','layers.0.*','layers.1.*']"
KEPT_EXPERTS = "--parallelism.fsdp_keep_whole=['layers.0.moe.*']"
MODEL = "--model.overrides."
MICRO_BATCH = "--parallelism.pipeline_parallel_microbatch_size="
MUON = "--optimizer.name=Muon --optimizer.eps=1e-3"
LAST_HAS_NO_MATRIX = (
    '--parallelism.module_fqns_per_model_part=[["tok_embeddings","layers.0","layers.1",'
    '"layers.2","layers.3"],["norm","output"]]'
)


@dataclass(frozen=True)
class Row:
    model: str
    ranks: int
    words: str = ""
    accumulation: int = 1

    @property
    def alone(self) -> tuple[str, ...]:
        """What one process needs too: the model, its options and the optimizer."""
        words = self.words.split()
        return self.model, *(w for w in words if w.startswith(("--model.", "--optimizer.")))


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels with holes; the first quarter (one rank of four) has no valid
    token.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(256, (SAMPLES, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    labels[: SAMPLES // 4] = IGNORED
    return tokens[:, :-1], labels


def own_batches(run: Trainer) -> list[Any]:
    """Return this rank's part of the ragged batch."""
    mine = micro_batches(*ragged_batch(), run.data.rank_slice)
    return [take(run.runner.model, batch) for batch in mine]


def prefer(run: Trainer, experts: Collection[int]) -> None:
    """Let all tokens choose these experts, of a model with balance "bias"."""
    for router in routers(*run.parts).values():
        router.bias.zero_()
        router.bias[[*experts]] = 10.0


def one_step(argv: list[str], folder: str, preferred: Collection[int] = ()) -> dict[str, Any]:
    """Return the numbers of one step, of what this rank has of the model, and what it did."""
    torch.compiler.reset()  # or it mixes up graphs of different meshes in one process
    run = trainer(
        [*argv, f"--training.global_batch_size={SAMPLES}", "--training.max_norm=0.5"], folder
    )
    run.step = 1
    if preferred:
        prefer(run, preferred)
    table = run.runner.context.table
    parameters = {name: p for part in run.parts for name, p in named_parameters(part, table)}
    before = {name: full(p) for name, p in parameters.items()}
    own = own_batches(run)
    loss = forward_backward(run, own)
    valid = count_valid(torch.stack([batch.labels for batch in own])) * run.runner.model.has_loss
    norm = run.runner.gradient_norm()
    found = {
        "loss": loss_over_ranks(loss, valid, run.runner.context.mesh.loss)[0],
        "gradients": {name: full(p.grad) for name, p in parameters.items() if p.grad is not None},
        "inf norm": run.runner.gradient_norm(float("inf")).item(),
        "norm": norm.item(),
    }
    run.runner.update(1, norm)
    pipeline = run.runner.model
    if isinstance(pipeline, Pipeline):
        row = orders(run.job.stages)[run.runner.context.mesh.world["pp"].get_local_rank()]
        declared = [f"{action}" for cell in row for action in parse(cell)]
        found |= {"actions": pipeline.actions, "declared": declared}
    after = {name: full(p) for name, p in parameters.items()}
    return {**found, "before": before, "after": after}


def step_of(pool: Pool, row: Row, folder: Path, preferred: Collection[int] = ()) -> list[Any]:
    """Return the numbers of a row's step, of each rank."""
    argv = [*MODELS[row.model], *FLOAT64, *SGD, *row.words.split()]
    layout = job([*argv, f"--training.local_batch_size={SAMPLES}"], row.ranks).layout
    argv.append(
        f"--training.local_batch_size={SAMPLES // layout.data_parallel // row.accumulation}"
    )
    # Some compile.
    return pool.run(one_step, argv, str(folder), preferred, world=row.ranks, timeout=300)


def same_as_alone(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Require of ranks the numbers of one process: together they have all parameters, and those
    that several have are equal.
    """
    for kind in ("before", "gradients", "after"):
        together: dict[str, torch.Tensor] = {}
        for found in ranks:
            for name, value in found[kind].items():
                assert torch.equal(together.setdefault(name, value), value), f"{kind} of {name}"
        assert together.keys() == expected[kind].keys()
        for name, value in together.items():
            error = relative_error(value, expected[kind][name])
            assert error <= (0 if kind == "before" else 1e-10), f"{kind} of {name}"
    for number in ("loss", "norm", "inf norm"):
        for found in ranks:
            assert math.isclose(found[number], expected[number], rel_tol=1e-10), number


@contextmanager
def operations() -> Iterator[list[tuple[Any, Any, Any]]]:
    """Record each operation that is computed, with its arguments and its result."""
    seen: list[tuple[Any, Any, Any]] = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.append((func, args, result))
            return result

    with Recorded():
        yield seen


def computed(argv: list[str], folder: str) -> list[tuple[str, str, int, int]]:
    """Return the operations of a step: their namespaces, names, and how many elements their first
    argument and their result have.
    """

    def elements(value: Any) -> int:
        return value.numel() if isinstance(value, torch.Tensor) else 0

    run = trainer([*argv, f"--training.local_batch_size={SAMPLES}"], folder)
    own = own_batches(run)
    with operations() as seen:
        forward_backward(run, own)
    return [
        (func.namespace, func.overloadpacket.__name__, sum(map(elements, args[:1])), elements(made))
        for func, args, made in seen
    ]


@contextmanager
def watching(
    owner: Any, names: Iterable[str], see: Callable[[str, tuple[Any, ...], Any], None]
) -> Iterator[None]:
    """Let `see` have the name, the arguments and the result of each call of these functions; the
    keywords are the last argument.
    """

    def watched(name: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            see(name, (*args, kwargs), result)
            return result

        return called

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(owner, name, watched(name)))
        yield


@contextmanager
def on_a_fake_rank(argv: list[str], world: int) -> Iterator[tuple[torch.nn.Module, Context]]:
    """Yield a model on the meta device, and the context of a rank without other processes."""
    found = job(argv, world)
    model, table = build_model(found)
    with fake_world(found.layout) as mesh:
        yield model, Context(found, mesh, table, torch.device("cpu"))


def graphs_of(argv: list[str], world: int) -> int:
    """Return how many graphs a rank of a fake world compiles in a step."""
    argv, before = [*argv, *COMPILED.split(), "--compile.components=['model']"], compiled_graphs()
    with on_a_fake_rank(argv, world) as (model, context):
        parallelize(model, context)
        allocate(model, context.device)
        rows = torch.zeros(1, 2, 16, dtype=torch.int64)
        batch = MicroBatch(rows, own_positions(context.job, 0, context.device, 16))
        model_loss(model, batch, batch.tokens, chunks=1).backward()
    return compiled_graphs() - before


def validation_and_sample(argv: list[str], folder: str) -> tuple[float, str]:
    run = trainer([*argv, *FLOAT64, "--validation.enable", "--validation.steps=3"], folder)
    before = OWN_PAGE.sequence
    loss = validated(run)
    seen = OWN_PAGE.sequence - before
    assert seen >= 3 // run.job.layout.data_parallel, (
        "a batch is progress, or a long validation hangs"
    )
    settings = run.job.config.generate.model_copy(
        update={"tokens": 9, "temperature": 0.7, "prompt": "def "}
    )
    text = generate(run.runner.model, run.data.tokenizer, settings, 16, 0)
    assert all(part.training for part in run.parts)
    return loss, text


def numbers(folder: Path) -> list[dict[str, float]]:
    """Return what a run has logged of its steps: losses, norms, and the load of experts."""
    kinds = "loss", "grad_norm", "expert_load_max", "experts_idle", "auxiliary_loss"
    logged = (each for each in records(folder) if "loss" in each)
    return [{kind: each[kind] for kind in kinds if kind in each} for each in logged]


def cut_and_straight(
    pool: Pool, argv: list[str], folder: Path, stop: int, world: int
) -> tuple[list[Any], list[Any]]:
    """Return the state of each rank after a run that stopped at a step and was resumed, and after
    one that was not; require the same numbers of their steps.
    """
    straight = pool.run(run_until, argv, str(folder / "straight"), world=world)
    pool.run(run_until, argv, str(folder / "cut"), stop, world=world)
    cut = pool.run(run_until, argv, str(folder / "cut"), world=world)
    assert cut[0]["begun"] == stop
    assert numbers(folder / "cut") == numbers(folder / "straight")
    return [rank["state"] for rank in cut], [rank["state"] for rank in straight]


IN_DEFAULT = {
    "blocks in one group": Row("llama", 2, f"{GROUPED} {PREFETCH}", 3),
    "offloaded": Row("llama", 2, OFFLOADED, 3),
    "kept whole, tied": Row("llama", 2, f"{SMALL} {MODEL}tied {DEFERRED}true", 3),
    "muon, kept whole": Row("even", 2, f"{MUON} {SMALL}"),
    "stages": Row("four", 2, PP, 2),
    "stages, tied, kept whole": Row("gpt2", 2, f"{PP} {SMALL}"),
    "experts": Row("experts", 2, EP),
    "uneven shards": Row("odd", 3, "", 2),
    "replicas": Row("llama", 2, f"{HSDP} {MODEL}tied", 3),
    "deferred over replicas": Row("llama", 4, f"{HSDP} {DEFERRED}replicas", 3),
    "tp, kept whole": Row("even", 2, f"{TP} {SMALL}"),
    "stages in a V": Row("four", 2, f"{PP} {ZBV}", 2),
}
IN_LONG = {
    "compiled, recomputed": Row(
        "llama", 2, f"{RECOMPUTED}selective {COMPILED} {PREFETCH} {DEFERRED}true", 3
    ),
    "resharded to two": Row("llama", 4, f"{RESHARD}2", 3),
    "muon, offloaded": Row("even", 2, f"{MUON} {OFFLOADED}"),
    "muon, tp, kept whole": Row("even", 4, f"{TP} {MUON} {SMALL}"),
    "memory budget": Row("llama", 2, f"{COMPILED} {RECOMPUTED}memory_budget", 3),
    "stages, frozen tie": Row("four", 2, f"{PP} {MODEL}tied {FREEZE}['tok_embeddings.*']", 2),
    "zero bubble, tied": Row("four", 2, f"{PP} {SCHEDULE}InterleavedZeroBubble {MODEL}tied"),
    "larger micro-batches": Row("four", 2, f"{PP} {MICRO_BATCH}3", 2),
    "ep compiled": Row("experts", 2, f"{EP} {FULL} {COMPILED}"),
    "ep over tp, frozen": Row("experts", 2, f"{EP} {TP} {FROZEN_EXPERTS}"),
    "experts in a block's group": Row("experts", 2, KEPT_EXPERTS),
    "uneven experts": Row("experts", 3),
    "kept whole, recomputed, compiled": Row(
        "llama", 4, f"{HSDP} {SMALL} {FULL} {COMPILED} {PREFETCH}", 3
    ),
    "replicas, tp, muon": Row("even", 4, f"{HSDP} {TP} {MUON} {FULL} {COMPILED}"),
    "replicas of whole experts": Row("experts", 4, f"{HSDP} {TP} {EP}", 3),
    "stages, hsdp": Row("four", 4, f"{PP} {HSDP} {SCHEDULE}DualPipeV", 2),
    "four stages": Row("gpt2", 4, f"{PP4} {SCHEDULE}GPipe"),
    "lanes of four": Row("four", 4, f"{PP4} {INTERLEAVED} {MODEL}n_layers=8"),
    "stages, frozen": Row("four", 4, f"{PP} {SCHEDULE}LoopedBFS {FROZEN_ENDS}", 2),
    "a stage without gradients": Row("four", 4, f"{PP} {FROZEN_STAGE}", 2),
    "V, cp, chunks": Row("four", 4, f"{PP} {CP} {ZBV} {CHUNKS}2", 2),
    "stages, compiled": Row("four", 2, f"{PP} {CHUNKS}2 {COMPILED} {FULL}", 2),
    "stages, resharded": Row("four", 4, f"{PP} {RESHARD}always {PREFETCH} {BY_OPERATION}", 2),
    "V, offloaded": Row("four", 4, f"{PP} {ZBV} {OFFLOADED}", 2),
    "stages, tp": Row("four", 4, f"{PP} {TP}", 2),
    "tp, offloaded": Row("even", 4, f"{TP} {OFFLOADED}"),
    "muon of a stage": Row("four", 4, f"{PP} {MUON} {LAST_HAS_NO_MATRIX}", 2),
    "ep, by operation": Row("experts", 4, f"{HSDP} {EP} {DEFERRED}true {BY_OPERATION}", 3),
    "ep over dp and tp": Row("experts", 4, f"{EP4} {TP} {MODEL}balance=bias"),
    "ep over dp and cp": Row("experts", 4, f"{EP4} {CP} {ULYSSES}"),
    "experts of tp": Row("experts", 4, TP),
    "experts, dim 1": Row("experts", 4, f"{EP} {MODEL}experts=6 {PREFETCH} {FULL} {MUON}"),
    "experts, stages": Row("experts", 4, f"{PP} {EP} {INTERLEAVED} {MODEL}n_layers=6"),
}
