"""Techniques are really active: checked on recorded collectives and operations, never on the
settings.
"""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.jobs import FLOAT64, TINY, forward_backward, job, trainer
from tests.lanes import sample
from tests.messages import refused, says
from tests.parallel.rows import (
    COMPILED,
    DEFERRED,
    EVEN,
    GPT2,
    GROUPED,
    HSDP,
    OFFLOADED,
    RECOMPUTED,
    RESHARD,
    SAMPLES,
    TP,
    on_a_fake_rank,
    operations,
    own_batches,
    watching,
)
from tests.runs import finish, python, records, run, start
from titanlite.parallel import fsdp, replicated
from titanlite.parallel.fsdp_schedule import schedule
from titanlite.parallel.parallelize import parallelize
from titanlite.runtime.torch_private import compiled_graphs
from titanlite.train.loss import count_valid, model_loss

FOUR_LAYERS = [*TINY, "--model.overrides.n_layers=4"]
WHOLE = f"--training.local_batch_size={SAMPLES}"


_SINGLE = hasattr(dist, "all_gather_single")  # as torch 2.13 calls them
NAMES = {
    "all_gather_single" if _SINGLE else "all_gather_into_tensor": "gather",
    "reduce_scatter_single" if _SINGLE else "reduce_scatter_tensor": "scatter",
    "all_reduce": "all_reduce",
}


def record(argv: list[str], folder: str) -> dict[str, Counter[str]]:
    """Return one step's collectives by name and group size, and the operations that are
    computed.
    """
    run = trainer([*argv, f"--training.global_batch_size={SAMPLES}"], folder)
    counts = Counter[str]()

    def count(name: str, args: tuple[Any, ...], _: Any) -> None:
        group = args[-1].get("group") or dist.group.WORLD
        counts[f"{NAMES[name]} {dist.get_world_size(group)}"] += 1

    batches = own_batches(run)
    valid = run.guard.exchange(count_valid(torch.stack([batch.labels for batch in batches])))
    with operations() as computed, watching(dist, NAMES, count):
        run.runner.forward_backward(1, batches, valid)
    names = Counter(func.overloadpacket.__name__ for func, *_ in computed)
    return {"counts": counts, "operations": names}


def seen(pool, folder, *argv: str, world: int = 2, accumulation: int = 1) -> dict:
    local = f"--training.local_batch_size={SAMPLES // world // accumulation}"
    return pool.run(record, [*FOUR_LAYERS, local, *argv], str(folder), world=world)[0]


SMALL = "--parallelism.fsdp_keep_whole=['tok_embeddings.*','layers.*_norm.weight']"
GROUPS = 6  # the embedding, four blocks, norm and output
GATHERS = 2 * GROUPS - 2  # the backward pass keeps the last group, and needs no embedding
COLLECTIVES = {  # ranks, accumulation, words
    "fsdp": (2, 1, "", {"gather 2": GATHERS, "scatter 2": GROUPS}),
    "never": (2, 1, f"{RESHARD}never", {"gather 2": GROUPS, "scatter 2": GROUPS}),
    "always": (2, 1, f"{RESHARD}always", {"gather 2": 2 * GROUPS - 1, "scatter 2": GROUPS}),
    "blocks in one group": (2, 1, GROUPED, {"gather 2": 6, "scatter 2": 4}),
    "deferred": (2, 3, f"{DEFERRED}true", {"scatter 2": GROUPS}),
    # The embedding's group has nothing left to gather; a block without its norms still gathers.
    # One sum is the embedding's, one that of all norms.
    "kept whole": (
        2,
        3,
        SMALL,
        {"gather 2": 3 * (GATHERS - 1), "scatter 2": 3 * (GROUPS - 1), "all_reduce 2": 2},
    ),
    "only their sum is deferred": (
        4,
        3,
        f"{HSDP} {DEFERRED}replicas",
        {"gather 2": 3 * GATHERS, "scatter 2": 3 * GROUPS, "all_reduce 2": GROUPS},
    ),
    # Its 30 matrices, which are small, and all norms.
    "replicas": (2, 3, HSDP, {"all_reduce 2": 2}),
    "partly resharded": (4, 1, f"{RESHARD}2", {"gather 4": GROUPS, "gather 2": GROUPS - 1}),
    "kept whole by replicas": (
        4,
        1,
        f"{HSDP} {SMALL}",
        {
            "gather 2": GATHERS - 1,
            "scatter 2": GROUPS - 1,
            "all_reduce 2": GROUPS - 1,
            "all_reduce 4": 2,
        },
    ),
}


def test_replicas_sum_neighboring_small_matrices_together_and_large_ones_in_place():
    most = replicated._MOST
    group: Any = None
    matrices = [torch.nn.Parameter(torch.empty(n, 1)) for n in (most, 10, 10, 2 * most, 10)]
    sums = replicated.GradientSum(matrices, group, torch.float32, torch.device("cpu"))
    assert [len(bundle) for bundle in sums._bundles] == [1, 1, 2, 1]


@pytest.mark.parametrize("name", sample(COLLECTIVES, *list(COLLECTIVES)[:-3]))
def test_a_step_issues_the_collectives_of_its_settings(pool, tmp_path, name):
    world, accumulation, words, expected = COLLECTIVES[name]
    found = seen(pool, tmp_path, *words.split(), world=world, accumulation=accumulation)["counts"]
    if name in ("deferred", "partly resharded"):
        found = Counter({kind: found[kind] for kind in expected})
    assert found == expected


def sums_in_the_backward_pass(argv: list[str], folder: str) -> list[int]:
    """Return how many sums had started before each micro-batch, and after the last, if no matrix is
    small.
    """
    with patch.object(replicated, "_MOST", 0):
        run = trainer([*argv, f"--training.global_batch_size={SAMPLES}"], folder)
    runner = run.runner
    sums: list[int] = []
    seen: list[int] = []

    def loss(*arguments: Any) -> torch.Tensor:
        seen.append(len(sums))
        return model_loss(*arguments)

    runner.model.loss = loss  # type: ignore[attr-defined]
    with watching(dist, ["all_reduce"], lambda *_: sums.append(1)):
        runner.model.gradients(1, own_batches(run), lambda: torch.tensor(1), runner.before_last)
        seen.append(len(sums))
    for sum_gradients in runner.after_backward:
        sum_gradients()
    return seen


def test_replicas_sum_matrices_in_the_last_backward_pass(pool, tmp_path):
    argv = [*FOUR_LAYERS, HSDP, f"--training.local_batch_size={SAMPLES // 6}"]
    found = pool.run(sums_in_the_backward_pass, argv, str(tmp_path), world=2)
    assert found == [[0, 0, 0, 30]] * 2


@pytest.mark.parametrize("key", fsdp._METHODS)
def test_fsdp2_is_told_of_a_communicator_of_its_own_and_a_torch_that_lacks_it_is_named(
    key, monkeypatch
):
    """The first is of the root, symmetric memory of every group."""
    method = fsdp._METHODS[key]
    called: list[torch.nn.Module] = []
    monkeypatch.setattr(FSDPModule, method, lambda group: called.append(group), raising=False)
    argv = [*EVEN, f"--parallelism.{key}", "--job.device=cuda"]
    with on_a_fake_rank(argv, 2) as (model, context):
        parallelize(model, replace(context, device=torch.device("cuda")))
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert called == (groups if key == "enable_fsdp_symm_mem" else [model])
    monkeypatch.delattr(FSDPModule, method)
    with on_a_fake_rank(argv, 2) as (model, context):
        context = replace(context, device=torch.device("cuda"))
        with refused(f"parallelism.{key}", "torch 2.14"):
            parallelize(model, context)
    with on_a_fake_rank(argv, 2) as given:  # what a plan on a node without GPUs does
        parallelize(*given)


def test_one_rank_divides_no_gradient_by_one(pool, tmp_path):
    """FSDP2 would, with a factor of 1, in each of its groups."""
    casts = ["--training.mixed_precision_param=bfloat16"]
    divisions = [seen(pool, tmp_path, *more, world=1)["operations"]["div"] for more in ([], casts)]
    assert divisions[0] == divisions[1]


PREFETCH = "--parallelism.fsdp_forward_prefetch=2"


def test_schedule_is_readable_data():
    argv = [*FOUR_LAYERS, PREFETCH, "--parallelism.fsdp_backward_prefetch=1"]
    plan = schedule(job(argv, 2), tied=False)
    blocks = [f"layers.{number}" for number in range(4)]
    assert plan.labels == ("tok_embeddings", *blocks, "norm+output")
    assert plan.forward == ((1, 2), (2, 3), (3, 4), (4, 5), (5,), ())
    assert plan.backward == ((), (), (1,), (2,), (3,), (4,))
    grouped = [*argv, "--model.overrides.tied", "--parallelism.fsdp_blocks_per_group=3"]
    tied = schedule(job(grouped, 2), tied=True)
    assert tied.labels == ("tok_embeddings+norm+output", "+".join(blocks[:3]), "layers.3")
    assert tied.backward_order == (0, 2, 1) and tied.backward == ((2,), (), (1,)), (
        "the output is needed first, and stays gathered until then"
    )
    says(tied, "tok_embeddings+norm+output gathers layers.3", "layers.2 gathers nothing")
    says(schedule(job(FOUR_LAYERS, 2), tied=False), "none ahead")
    stage = schedule(job(argv, 2), tied=False, modules={"layers", "layers.2", "layers.3"})
    assert stage.labels == ("layers.2", "layers.3") and stage.forward == ((1,), ())
    assert stage.last == 1 and not stage.last_is_root


def test_notes_name_what_was_applied_once_each_in_order():
    """A technique that has nothing to do is not mentioned."""
    words = f"{TP} {COMPILED} {RECOMPUTED}full"
    names = ["tensor parallel on 2", "torch.compile", "recompute every", "FSDP on 2"]
    casts = ["--training.mixed_precision_param=bfloat16"]
    mode = "max-autotune-no-cudagraphs"
    tuned = ["--compile.enable", f"--compile.mode={mode}"]
    rows = [(1, [], []), (1, casts, ["bfloat16 to parameters"]), (4, words.split(), names)]
    rows.append((1, tuned, [f"backend inductor, mode {mode}"]))
    for world, argv, expected in rows:
        with on_a_fake_rank([*EVEN, *argv], world) as (model, context):
            _, notes = parallelize(model, context)
        assert len(notes) == len(expected)
        for note, name in zip(notes, expected, strict=True):
            assert name in note


def test_config_command_prints_the_schedule_without_torch():
    code = (
        "import sys, titanlite.cli as c; "
        f"c.main('config --schedule {PREFETCH}'.split()); sys.exit('torch' in sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0 and "  layers.1 gathers layers.2, layers.3" in done.stdout


def test_recompute_modes_repeat_the_expected_operations(pool, tmp_path):
    """Count matrix products of a step: each block has seven in its forward pass."""

    def computed(*argv: str) -> Counter[str]:
        return seen(pool, tmp_path, *argv, world=1)["operations"]

    full, selective = (f"{RECOMPUTED}{mode}" for mode in ("full", "selective"))
    plain = computed()["mm"]
    assert computed(full)["mm"] == plain + 4 * 7
    second = computed(selective, "--activation_checkpoint.selective_ac_option=2")
    assert second["mm"] == plain + 2 * 7
    by_operation = computed(selective)
    assert by_operation["mm"] == plain + 4 * 3, "of seven, four are kept"
    early = computed(full, "--activation_checkpoint.early_stop")["mm"]
    assert plain < early < plain + 4 * 7, "the last product's result is not needed again"
    forward = [
        n
        for name, n in by_operation.items()
        if "flash_attention" in name and "backward" not in name
    ]
    assert sum(forward) == 4, "attention is kept"


def dropped_gradient(folder: str, *argv: str) -> torch.Tensor:
    run = trainer([*GPT2, WHOLE, "--model.overrides.dropout=0.5", *argv], folder)
    forward_backward(run, own_batches(run))
    gradient = run.parts[0].get_parameter("layers.0.attention.wq.weight").grad
    assert gradient is not None
    return gradient.clone()


def test_recompute_repeats_dropout_masks_unless_disabled(pool, tmp_path):
    def gradient(*argv: str) -> torch.Tensor:
        return pool.run(dropped_gradient, str(tmp_path), *argv, world=1)[0]

    plain, full = gradient(), f"{RECOMPUTED}full"
    assert torch.equal(gradient(full), plain)
    careless = gradient(full, "--activation_checkpoint.no_preserve_rng_state")
    assert not torch.allclose(careless, plain)


def compiled(folder: str, name: str, *argv: str) -> set[str]:
    """Return what a step compiles."""
    torch.compiler.reset()
    names: set[str] = set()

    def backend(graph, inputs):
        text = graph.print_readable(print_output=False)
        kinds = {"cross_entropy": "loss", "scaled_dot_product": "block"}
        names.add(next((kind for word, kind in kinds.items() if word in text), "other"))
        return graph.forward

    torch._dynamo.register_backend(backend, name=name)
    run = trainer([*FOUR_LAYERS, WHOLE, *argv], folder)
    forward_backward(run, own_batches(run))
    return names


@pytest.mark.parametrize("kinds", sample(["block loss", "block", "loss", ""], ""))
def test_components_are_compiled_as_set_and_nothing_by_default(pool, tmp_path, kinds):
    name = "seen_" + kinds.replace(" ", "_")
    components = kinds.replace("block", "model").split()
    argv = ["--compile.enable", f"--compile.backend={name}", f"--compile.components={components}"]
    found = pool.run(compiled, str(tmp_path), name, *(argv if kinds else []), world=1)
    assert found == [{*kinds.split()}]


def test_a_mode_is_given_to_the_compiler(monkeypatch):
    given: list[str | None] = []

    def compile(forward: Any, mode: str | None = None, **options: Any) -> Any:
        given.append(mode)
        return forward

    monkeypatch.setattr(torch, "compile", compile)
    for mode in ("default", "max-autotune-no-cudagraphs"):
        argv = [*FOUR_LAYERS, "--compile.enable", f"--compile.mode={mode}"]
        with on_a_fake_rank(argv, 1) as (model, context):
            parallelize(model, context)
    assert given == 4 * [None] + 4 * ["max-autotune-no-cudagraphs"]


def test_a_cache_folder_is_given_to_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "earlier"))
    argv = [*EVEN, "--compile.enable", f"--compile.cache_folder={tmp_path}"]
    with on_a_fake_rank(argv, 1) as (model, context):
        parallelize(model, context)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)


@pytest.mark.nightly
def test_kernels_lie_in_the_cache_folder_and_the_next_start_compiles_none(tmp_path):
    kept = tmp_path / "kernels"
    argv = f"{' '.join(TINY)} --training.steps=1 --model.overrides.n_layers=1 --compile.enable"
    argv += f" --compile.cache_folder={kept}"

    def kernels_of(folder: Path) -> set[Path]:
        """Train, and return the kernels that are there then; inductor may need minutes."""
        code, out = finish(start(argv.split(), folder), 600)
        assert code == 0, out
        return {path for path in kept.rglob("*") if path.suffix in (".cpp", ".so", ".py")}

    first = kernels_of(tmp_path / "first")
    assert first
    assert kernels_of(tmp_path / "second") == first
    assert records(tmp_path / "first")[0]["loss"] == records(tmp_path / "second")[0]["loss"]


def test_a_cache_folder_that_cannot_be_written_is_refused_before_the_start(tmp_path):
    (tmp_path / "file").touch()
    argv = [*TINY, "--compile.enable", f"--compile.cache_folder={tmp_path / 'file'}"]
    says(run(argv, tmp_path, code=2).out, "compile.cache_folder", f"{tmp_path / 'file'}")


def validated(folder: str) -> list[int]:
    """Return the number of graphs that each validation and the generation at the end added."""
    torch.compiler.reset()
    (Path(folder) / "text.txt").write_text("a few words, " * 19)
    words = (
        f"--validation.dataset_path={folder}/text.txt --validation.enable --validation.freq=2 "
        "--validation.local_batch_size=3 --generate.at_end --generate.tokens=20 "
        "--metrics.log_freq=1 --training.steps=6"
    )
    run = trainer([*TINY, *COMPILED.split(), *words.split()], folder)
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


@pytest.mark.long
def test_nothing_is_recompiled_after_warm_up(pool, tmp_path):
    """The first step is the warm-up of training, the first validation that of validation, which
    needs no gradients.

    Its last batch is not full (15 windows for batches of six), and generated text grows by a token
    at a time."""
    added = pool.run(validated, str(tmp_path), world=2)[0]
    assert added == [1, 0, 0, 0]
    assert [each["recompiles"] for each in records(tmp_path) if "loss" in each] == [0] * 6


def saved_bytes(folder: str, *argv: str) -> int:
    """Return the bytes that a compiled forward pass keeps for its backward pass."""
    torch.compiler.reset()
    run = trainer([*FOUR_LAYERS, WHOLE, *FLOAT64, *COMPILED.split(), *argv], folder)
    (batch,) = own_batches(run)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run.parts[0](batch.tokens, batch.positions, batch.documents).sum()
    return sum(kept.values())


@pytest.mark.long
def test_memory_budget_is_kept_and_ends_with_its_run(pool, tmp_path):
    """All runs share one process, the last one being without a budget."""

    def kept(*argv: str) -> int:
        return pool.run(saved_bytes, str(tmp_path), *argv, world=1)[0]

    shares = [f"--activation_checkpoint.memory_budget={share}" for share in (0.0, 0.4, 1.0)]
    sizes = [kept(f"{RECOMPUTED}memory_budget", share) for share in shares]
    assert sizes == sorted(set(sizes)), "a larger budget keeps more"
    assert sizes[-1] == kept(), "a whole budget keeps what no budget keeps"


def offload_policies(folder: str) -> set[str]:
    """Return the policies by which FSDP2 moves parameters."""
    run = trainer([*TINY, OFFLOADED], folder)
    modules = [module for module in run.parts[0].modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    return {type(group.offload_policy).__name__ for group in groups if group}


def test_cpu_offload_is_active(pool, tmp_path):
    """On one rank too, where FSDP2 only casts and moves."""
    assert pool.run(offload_policies, str(tmp_path), world=1) == [{"CPUOffloadPolicy"}]
