"""Techniques are really active: checked on recorded collectives and operations, never on the
settings.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.jobs import (
    FLOAT64,
    QUIET,
    TINY,
    forward_backward,
    job,
    micro_batches,
    run_to_end,
    trainer,
)
from tests.lanes import sample
from tests.parallel.test_exact import SAMPLES, ragged_batch
from tests.runs import environment
from titanlite.config.load import ConfigError
from titanlite.parallel.fsdp_schedule import schedule
from titanlite.runtime.torch_private import compiled_graphs
from titanlite.train.loss import count_valid
from titanlite.verify.pool import RankFailed

FOUR_LAYERS = [*TINY, "--model.overrides.n_layers=4"]
GPT2 = (
    "--model.name=gpt2 --model.overrides.dim=16 --model.overrides.n_layers=2 "
    "--model.overrides.n_heads=2"
).split()


class Operations(TorchDispatchMode):
    """Count the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def record(argv: list[str], folder: str) -> dict:
    """Return one step's collectives by name and group size, and the order of all with the blocks'
    passes.
    """
    run = trainer([*argv, f"--training.global_batch_size={SAMPLES}"], folder)
    run.step = 1
    events: list[str] = []
    originals, gathered = {}, dict[str, list[str]]()

    def record_turn(name: str) -> None:
        """Record a block's turn, and which blocks have gathered parameters then."""
        events.append(name)
        parameters = {
            n: next(b.parameters())
            for n, b in run.parts[0].get_submodule("layers").named_children()
        }
        gathered[name] = [
            number for number, parameter in parameters.items() if not isinstance(parameter, DTensor)
        ]

    def wrap(name: str, label: str) -> None:
        originals[name] = original = getattr(dist, name)

        def called(*args, **kwargs):
            events.append(f"{label} {dist.get_world_size(kwargs.get('group') or dist.group.WORLD)}")
            return original(*args, **kwargs)

        setattr(dist, name, called)

    for number, block in run.parts[0].get_submodule("layers").named_children():
        block.register_forward_pre_hook(lambda *_, number=number: record_turn(f"forward {number}"))
        block.register_full_backward_pre_hook(
            lambda *_, number=number: record_turn(f"backward {number}")
        )
    batches = micro_batches(*ragged_batch(), run.rank_slice)
    valid = run.guard.exchange(count_valid(torch.stack([batch.labels for batch in batches])))
    single = hasattr(dist, "all_gather_single")  # as torch 2.13 calls them
    wrap("all_gather_single" if single else "all_gather_into_tensor", "gather")
    wrap("reduce_scatter_single" if single else "reduce_scatter_tensor", "scatter")
    wrap("all_reduce", "all_reduce")
    operations = Operations()
    try:
        with nullcontext() if "--compile.enable" in argv else operations:
            run.runner.forward_backward(run.step, batches, valid)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    counts = Counter(event for event in events if "ward" not in event)
    return {"events": events, "counts": counts, "operations": operations.seen, "gathered": gathered}


def seen(pool, folder, *argv: str, world: int = 2, accumulation: int = 1) -> dict:
    local = f"--training.local_batch_size={SAMPLES // world // accumulation}"
    return pool.run(record, [*FOUR_LAYERS, local, *argv], str(folder), world=world)[0]


GROUPS = 6  # the embedding, four blocks, norm and output


def test_fsdp_gathers_twice_and_reduces_once_per_group(pool, tmp_path):
    found = seen(pool, tmp_path)["counts"]
    assert found == {"gather 2": 2 * GROUPS - 1, "scatter 2": GROUPS}
    never = seen(pool, tmp_path, "--parallelism.fsdp_reshard_after_forward=never")["counts"]
    assert never["gather 2"] == GROUPS
    always = seen(pool, tmp_path, "--parallelism.fsdp_reshard_after_forward=always")["counts"]
    assert always["gather 2"] == 2 * GROUPS


def test_partial_resharding_gathers_again_over_that_many_ranks(pool, tmp_path):
    found = seen(pool, tmp_path, "--parallelism.fsdp_reshard_after_forward=2", world=4)["counts"]
    assert (found["gather 4"], found["gather 2"]) == (GROUPS, GROUPS)


def test_hsdp_all_reduces_over_replicas(pool, tmp_path):
    """Shards are gathered and reduced over two ranks, and every group is all-reduced over two
    replicas.
    """
    found = seen(pool, tmp_path, "--parallelism.data_parallel_replicate_degree=2", world=4)[
        "counts"
    ]
    assert found == {"gather 2": 2 * GROUPS - 1, "scatter 2": GROUPS, "all_reduce 2": GROUPS}
    replicas = seen(pool, tmp_path, "--parallelism.data_parallel_replicate_degree=2", world=2)[
        "counts"
    ]
    assert replicas["all_reduce 2"] == GROUPS


def test_deferred_sync_reduces_once_per_step(pool, tmp_path):
    plain = seen(pool, tmp_path, accumulation=3)["counts"]
    assert plain["scatter 2"] == 3 * GROUPS
    deferred = seen(pool, tmp_path, "--parallelism.defer_gradient_sync", accumulation=3)["counts"]
    assert deferred["scatter 2"] == GROUPS


def test_deferring_over_replicas_leaves_only_their_sum_to_the_last_micro_batch(pool, tmp_path):
    options = [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.defer_gradient_sync=replicas",
    ]
    found = seen(pool, tmp_path, *options, world=4, accumulation=3)
    events = found["events"]
    assert found["counts"] == {
        "gather 2": 3 * (2 * GROUPS - 1),
        "scatter 2": 3 * GROUPS,
        "all_reduce 2": GROUPS,
    }
    last = [number for number, event in enumerate(events) if event == "forward 0"][-1]
    assert "all_reduce 2" not in events[:last]


def test_grouped_blocks_share_a_gather(pool, tmp_path):
    found = seen(pool, tmp_path, "--parallelism.fsdp_blocks_per_group=2")["counts"]
    assert found["scatter 2"] == 4


def gathered_before(events: list[str], word: str) -> list[int]:
    """Return how many all-gathers were issued before each block's turn, in the order of the
    turns.
    """
    counts, gathers = [], 0
    for event in events:
        gathers += event.startswith("gather")
        if event.startswith(word):
            counts.append(gathers)
    return counts


RECOMPUTED_AND_COMPILED = (
    "--activation_checkpoint.mode=full --compile.enable --compile.backend=aot_eager"
)


@pytest.mark.parametrize("depth", sample([0, 1, 2, 3], 0, 2))
@pytest.mark.parametrize(
    "more", ["", RECOMPUTED_AND_COMPILED], ids=["plain", "recomputed and compiled"]
)
def test_forward_prefetch_follows_the_schedule(pool, tmp_path, depth, more):
    argv = [f"--parallelism.fsdp_forward_prefetch={depth}", *more.split()]
    plan = schedule(job([*FOUR_LAYERS, *argv], 2), tied=False)
    declared: list[int] = []
    issued: set[int] = set()
    for group in range(GROUPS):
        issued |= {group, *(plan.forward[group] if plan.forward else ())}
        if 1 <= group <= 4:
            declared.append(len(issued))
    found = seen(pool, tmp_path, *argv)
    assert gathered_before(found["events"], "forward")[:4] == declared
    for block, count in enumerate(
        declared
    ):  # at most depth + 1 at a time: this one, and what comes
        assert count <= block + 2 + depth and found["gathered"][f"forward {block}"] == [str(block)]


@pytest.mark.parametrize("depth", sample([1, 2, 3], 2))
def test_backward_prefetch_follows_the_schedule(pool, tmp_path, depth):
    argv = [f"--parallelism.fsdp_backward_prefetch={depth}"]
    plan = schedule(job([*FOUR_LAYERS, *argv], 2), tied=False)
    assert plan.backward is not None
    declared: list[int] = []
    issued: set[int] = {5}  # the last group was kept after the forward pass
    for group in reversed(range(GROUPS)):
        if 1 <= group <= 4:  # its turn is recorded before it gathers others
            declared.append(GROUPS + len(issued) - 1)
        issued |= {group, *plan.backward[group]}
    found = seen(pool, tmp_path, *argv)
    assert gathered_before(found["events"], "backward") == declared
    assert not any(found["gathered"][f"backward {block}"] for block in range(4)), (
        "the blocks before are sharded again"
    )


def test_never_resharding_keeps_blocks_gathered(pool, tmp_path):
    found = seen(pool, tmp_path, "--parallelism.fsdp_reshard_after_forward=never")["gathered"]
    assert found["forward 3"] == found["backward 3"] == ["0", "1", "2", "3"] and found[
        "backward 0"
    ] == ["0"]


def test_one_rank_divides_no_gradient_by_one(pool, tmp_path):
    """FSDP2 would, with a factor of 1, in each of its groups."""
    casts = ["--training.mixed_precision_param=bfloat16"]
    divisions = [seen(pool, tmp_path, *more, world=1)["operations"]["div"] for more in ([], casts)]
    assert divisions[0] == divisions[1]


def test_schedule_is_readable_data():
    argv = [
        *FOUR_LAYERS,
        "--parallelism.fsdp_forward_prefetch=2",
        "--parallelism.fsdp_backward_prefetch=1",
    ]
    plan = schedule(job(argv, 2), tied=False)
    assert plan.labels == (
        "tok_embeddings",
        "layers.0",
        "layers.1",
        "layers.2",
        "layers.3",
        "norm+output",
    )
    assert plan.forward == ((1, 2), (2, 3), (3, 4), (4, 5), (5,), ())
    assert plan.backward == ((), (0,), (1,), (2,), (3,), (4,))
    assert "  layers.0 gathers layers.1, layers.2" in str(
        plan
    ) and "  layers.3 gathers layers.2" in str(plan)
    tied = schedule(
        job([*argv, "--model.overrides.tied", "--parallelism.fsdp_blocks_per_group=3"], 2),
        tied=True,
    )
    assert tied.labels == ("tok_embeddings+norm+output", "layers.0+layers.1+layers.2", "layers.3")
    assert tied.backward_order == (0, 2, 1) and tied.backward == ((2,), (), (1,)), (
        "the output is needed first, and stays gathered until then"
    )
    assert str(tied).splitlines()[-3:] == [
        "  tok_embeddings+norm+output gathers layers.3",
        "  layers.3 gathers layers.0+layers.1+layers.2",
        "  layers.0+layers.1+layers.2 gathers nothing",
    ]
    assert "own order (none ahead)" in str(schedule(job(FOUR_LAYERS, 2), tied=False))


def test_config_command_prints_the_schedule_without_torch():
    code = (
        "import sys, titanlite.cli as c; "
        "c.main('config --schedule --parallelism.fsdp_forward_prefetch 2'.split()); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0 and "  layers.1 gathers layers.2, layers.3" in done.stdout


def test_recompute_modes_repeat_the_expected_operations(pool, tmp_path):
    """Count matrix products of a step: each block has seven in its forward pass."""

    def products(*argv: str) -> int:
        return seen(pool, tmp_path, *argv)["operations"]["mm"]

    plain = products()
    assert products("--activation_checkpoint.mode=full") == plain + 4 * 7
    selective = "--activation_checkpoint.mode=selective"
    assert products(selective, "--activation_checkpoint.selective_ac_option=2") == plain + 2 * 7
    assert products(selective) == plain + 4 * 3, "of seven, four are kept"
    early = products("--activation_checkpoint.mode=full", "--activation_checkpoint.early_stop")
    assert plain < early < plain + 4 * 7, "the last product's result is not needed again"
    operations = seen(pool, tmp_path, selective)["operations"]
    forward = [
        n for name, n in operations.items() if "flash_attention" in name and "backward" not in name
    ]
    assert sum(forward) == 4, "attention is kept"


def dropped_gradient(folder: str, *argv: str) -> torch.Tensor:
    local = f"--training.local_batch_size={SAMPLES}"
    run = trainer([*QUIET, *GPT2, local, "--model.overrides.dropout=0.5", *argv], folder)
    run.step = 1
    mine = micro_batches(*ragged_batch(), run.rank_slice)
    forward_backward(run, mine)
    gradient = run.parts[0].get_parameter("layers.0.attention.wq.weight").grad
    assert gradient is not None
    return gradient.clone()


def test_recompute_repeats_dropout_masks_unless_disabled(pool, tmp_path):
    def gradient(*argv: str) -> torch.Tensor:
        return pool.run(dropped_gradient, str(tmp_path), *argv, world=1)[0]

    plain = gradient()
    assert torch.equal(gradient("--activation_checkpoint.mode=full"), plain)
    careless = gradient(
        "--activation_checkpoint.mode=full", "--activation_checkpoint.no_preserve_rng_state"
    )
    assert not torch.allclose(careless, plain)


def compiled(folder: str, name: str, *argv: str) -> tuple[set[str], list[int]]:
    """Return what was compiled, and how many graphs each step after the first added."""
    torch.compiler.reset()
    names: set[str] = set()

    def backend(graph, inputs):
        text = graph.print_readable(print_output=False)
        names.add(
            "loss"
            if "cross_entropy" in text
            else "block"
            if "scaled_dot_product" in text
            else "other"
        )
        return graph.forward

    torch._dynamo.register_backend(backend, name=name)
    run = trainer([*FOUR_LAYERS, "--training.steps=6", *argv], folder)
    counts: list[int] = []
    step = run.train_step

    def counted() -> None:
        step()
        counts.append(compiled_graphs())

    run.train_step = counted  # type: ignore[method-assign]
    run.train()
    return names, [later - earlier for earlier, later in zip(counts, counts[1:], strict=False)]


@pytest.mark.parametrize(
    ("components", "expected"),
    [("['model','loss']", {"block", "loss"}), ("['model']", {"block"}), ("['loss']", {"loss"})],
)
def test_compile_components_are_compiled_once(pool, tmp_path, components, expected):
    name = "_".join(sorted(expected))
    argv = ("--compile.enable", f"--compile.backend={name}", f"--compile.components={components}")
    names, later = pool.run(compiled, str(tmp_path), name, *argv, world=2)[0]
    assert names == expected and later == [0] * 5


def validated(folder: str) -> list[int]:
    """Return the number of graphs that each validation and the generation at the end added."""
    torch.compiler.reset()
    (Path(folder) / "text.txt").write_text("a few words, " * 19)
    held_out = ["--validation.dataset=text", f"--validation.dataset_path={folder}/text.txt"]
    validation = [
        *held_out,
        "--validation.enable",
        "--validation.freq=2",
        "--validation.local_batch_size=3",
    ]
    sample = ["--generate.at_end", "--generate.tokens=20"]
    compiling = [
        "--compile.enable",
        "--compile.backend=aot_eager",
        "--metrics.log_freq=1",
        "--training.steps=6",
    ]
    run = trainer([*TINY, *compiling, *validation, *sample], folder)
    added: list[int] = []

    def count(name: str) -> None:
        original = getattr(run, name)

        def counted() -> Any:
            before = compiled_graphs()
            result = original()
            added.append(compiled_graphs() - before)
            return result

        setattr(run, name, counted)

    count("validate")
    count("show_sample")
    run.train()
    return added


def test_nothing_is_recompiled_after_warm_up(pool, tmp_path):
    """The first step is the warm-up of training, the first validation that of validation, which
    needs no gradients.

    Its last batch is not full (15 windows for batches of six), and generated text grows by a token
    at a time."""
    added = pool.run(validated, str(tmp_path), world=2)[0]
    assert added == [1, 0, 0, 0]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["recompiles"] for record in records if "loss" in record] == [0] * 6


def test_nothing_is_compiled_by_default(pool, tmp_path):
    assert pool.run(compiled, str(tmp_path), "none", world=2)[0] == (set(), [0] * 5)


def test_cluster_config_trains_on_one_rank(pool, tmp_path):
    """What only acts on several ranks changes nothing on one, where FSDP2 still casts the
    parameters.
    """
    options = [*TINY, "--training.mixed_precision_param=bfloat16", "--training.global_batch_size=4"]
    tuned = (
        "fsdp_forward_prefetch=2 fsdp_backward_prefetch=2 fsdp_reshard_after_forward=8 "
        "fsdp_blocks_per_group=2 fsdp_keep_whole=['norm.*'] defer_gradient_sync=true "
        "disable_loss_parallel=true"
    )
    tuned_options = [*options, *(f"--parallelism.{key}" for key in tuned.split())]
    plain = pool.run(run_to_end, options, str(tmp_path / "plain"), world=1)[0]
    found = pool.run(run_to_end, tuned_options, str(tmp_path / "tuned"), world=1)[0]
    assert any(
        line.startswith("no effect on 1 rank: parallelism.fsdp_reshard_after_")
        for line in found["start"]
    )
    told, plainly_told = (
        [x for x in run["start"] if not x.startswith("no effect")] for run in (found, plain)
    )
    assert told == plainly_told
    assert all(
        torch.equal(found["weights"][name], weight) for name, weight in plain["weights"].items()
    )
    assert "fsdp_forward_prefetch = 2" in (tmp_path / "tuned/config.toml").read_text()


KEPT = "--parallelism.fsdp_keep_whole"


def test_replicated_parameters_are_reduced_once_per_step(pool, tmp_path):
    """The embedding's group has nothing left to gather; a block without its norms still gathers
    once.
    """
    whole = f"{KEPT}=['tok_embeddings.*','layers.*_norm.weight']"
    found = seen(pool, tmp_path, whole, accumulation=3)["counts"]
    groups = GROUPS - 1
    assert found == {"gather 2": 3 * (2 * groups - 1), "scatter 2": 3 * groups, "all_reduce 2": 1}
    replicated = "--parallelism.data_parallel_replicate_degree=2"
    found = seen(pool, tmp_path, whole, replicated, world=4)["counts"]
    assert found == {
        "gather 2": 2 * groups - 1,
        "scatter 2": groups,
        "all_reduce 2": groups,
        "all_reduce 4": 1,
    }


def test_contradictory_keep_whole_is_refused(pool, tmp_path):
    kept = f"{KEPT}=['norm.*']"
    with pytest.raises(ConfigError, match="one or the other"):
        job([*TINY, kept, "--training.enable_cpu_offload"], 2)
    for pattern, says in (
        ("nothing.*", '"nothing.*" matches no parameter'),
        ("*", "matches every parameter"),
    ):
        with pytest.raises(RankFailed, match=re.escape(says)):
            pool.run(record, [*TINY, f"{KEPT}=['{pattern}']"], str(tmp_path), world=2)


def saved_bytes(folder: str, *argv: str) -> int:
    """Return the bytes that a compiled forward pass keeps for its backward pass."""
    torch.compiler.reset()
    local = f"--training.local_batch_size={SAMPLES}"
    run = trainer(
        [*FOUR_LAYERS, local, *FLOAT64, "--compile.enable", "--compile.backend=aot_eager", *argv],
        folder,
    )
    (batch,) = micro_batches(*ragged_batch(), run.rank_slice)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run.parts[0](batch.tokens, batch.positions, batch.documents).sum()
    return sum(kept.values())


def test_memory_budget_is_kept_and_ends_with_its_run(pool, tmp_path):
    """All runs share one process, the last one being without a budget."""

    def kept(*argv: str) -> int:
        return pool.run(saved_bytes, str(tmp_path), *argv, world=1)[0]

    budget = "--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget"
    sizes = [kept(budget[0], f"{budget[1]}={share}") for share in (0.0, 0.3, 0.6, 1.0)]
    assert sizes == sorted(set(sizes)), "a larger budget keeps more"
    assert sizes[-1] == kept(), "a whole budget keeps what no budget keeps"


def test_memory_budget_without_compile_is_refused():
    budget = [*TINY, "--activation_checkpoint.mode=memory_budget"]
    for argv in ([], ["--compile.enable", "--compile.components=['loss']"]):
        with pytest.raises(ConfigError, match="set compile.enable, with"):
            job([*budget, *argv], 1)
    with pytest.raises(ConfigError, match='use "inductor" or "aot_eager"'):
        job([*budget, "--compile.enable", "--compile.backend=eager"], 1)


def offload_policies(folder: str) -> set[str]:
    """Return the policies by which FSDP2 moves parameters, after a step."""
    run = trainer([*TINY, "--training.enable_cpu_offload", "--training.steps=1"], folder)
    run.train()
    groups = [
        m._get_fsdp_state()._fsdp_param_group
        for m in run.parts[0].modules()
        if isinstance(m, FSDPModule)
    ]
    return {type(group.offload_policy).__name__ for group in groups if group}


@pytest.mark.parametrize("world", [1, 2])
def test_cpu_offload_is_active(pool, tmp_path, world):
    assert pool.run(offload_policies, str(tmp_path), world=world)[0] == {"CPUOffloadPolicy"}
