"""Exactness beyond the table of `titanlite verify`: odd widths, more techniques, clipping, initial
values.
"""

import itertools

import pytest
import torch

from tests.jobs import (
    FLOAT64,
    PARROT,
    QUIET,
    TINY,
    forward_backward,
    gradients,
    micro_batches,
    relative_error,
    trainer,
    weights,
)
from tests.lanes import sample
from titanlite.data.packing import IGNORED
from titanlite.optim.grad_norm import clip_grad_norm
from titanlite.parallel.init import BLOCK, fill
from titanlite.registry import normal
from titanlite.train.loss import count_valid
from titanlite.train.report import loss_over_ranks

SAMPLES = 12
SGD = [
    f"--optimizer.{word}"
    for word in "name=SGD lr=0.1 weight_decay=0 implementation=for-loop".split()
]
"""The cheapest: DTensor searches for seconds how other operations are split on three dimensions."""
GPT2 = (
    "name=gpt2 overrides.dim=16 overrides.n_layers=2 overrides.n_heads=2 overrides.dropout=0.0"
).split()
MODELS = {
    "llama3": TINY,
    "llama3 tied": [*TINY, "--model.overrides.tied"],
    # Of nine rows on four ranks the last has none.
    "llama3 odd widths": [
        *TINY,
        "--model.overrides.n_kv_heads=2",
        "--model.overrides.hidden_dim=9",
    ],
    # Softmax ignores what a key's bias adds to all its scores: the gradient is zero but for
    # rounding.
    "gpt2": [*QUIET, *(f"--model.{f}" for f in GPT2), '--model.freeze=["*.wk.bias"]'],
}


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


def one_step(argv: list[str], folder: str) -> dict:
    """Return the numbers of one optimizer step, with the weights before and after it."""
    run = trainer([*argv, *FLOAT64, *SGD], folder)
    run.step = 1
    mine = micro_batches(*ragged_batch(), run.rank_slice)
    before = weights(run)
    loss = forward_backward(run, mine)
    found = {
        "loss": loss_over_ranks(loss, count_valid(mine[0].labels), run.mesh.loss)[0],
        "gradients": gradients(run),
    }
    found["inf norm"] = clip_grad_norm(run.runner.parameters, float("inf"), p=float("inf")).item()
    found["norm"] = clip_grad_norm(run.runner.parameters, 0.5).item()
    run.runner.optimizer.step()
    return {**found, "before": before, "after": weights(run)}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    whole = [f"--training.local_batch_size={SAMPLES}"]
    return {
        name: pool.run(one_step, [*argv, *whole], folder, world=1)[0]
        for name, argv in MODELS.items()
    }


@pytest.mark.parametrize(("world", "accumulation"), [(3, 2), (4, 1)])
def test_uneven_shards_change_no_number(pool, alone, tmp_path, world, accumulation):
    model = "llama3 odd widths"
    sizes = [
        f"--training.local_batch_size={SAMPLES // world // accumulation}",
        f"--training.global_batch_size={SAMPLES}",
    ]
    for found in pool.run(one_step, [*MODELS[model], *sizes], str(tmp_path), world=world):
        same_as_alone(found, alone[model])


def same_as_alone(found: dict, expected: dict) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert relative_error(found["gradients"][name], gradient) <= 1e-10, name
        assert torch.equal(found["before"][name], expected["before"][name]), name
        assert relative_error(found["after"][name], expected["after"][name]) <= 1e-10, name
    for number in ("loss", "norm", "inf norm"):
        assert found[number] == pytest.approx(expected[number], rel=1e-10), number


SMALL = "['tok_embeddings.*','layers.0.*','*norm.weight']"
TECHNIQUES = {
    "blocks in one group": (
        2,
        "--parallelism.fsdp_blocks_per_group=2 --parallelism.fsdp_forward_prefetch=1",
    ),
    "reshard to two": (4, "--parallelism.fsdp_reshard_after_forward=2"),
    "deferred sync": (2, "--parallelism.defer_gradient_sync"),
    "replicas deferred": (
        4,
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.defer_gradient_sync=replicas",
    ),
    "replicas offloaded, deferred": (
        4,
        "--parallelism.data_parallel_replicate_degree=2 --parallelism.defer_gradient_sync=replicas "
        "--training.enable_cpu_offload",
    ),
    "memory budget": (
        2,
        "--activation_checkpoint.mode=memory_budget --activation_checkpoint.memory_budget=0.1 "
        "--compile.enable --compile.backend=aot_eager",
    ),
    "cpu offload": (2, "--training.enable_cpu_offload"),
    "cpu offload, replicas, deferred": (
        4,
        "--training.enable_cpu_offload --parallelism.data_parallel_replicate_degree=2 "
        "--parallelism.defer_gradient_sync",
    ),
    "replicated": (2, f"--parallelism.fsdp_keep_whole={SMALL}"),
    "replicated, replicas, recomputed, compiled": (
        4,
        f"--parallelism.fsdp_keep_whole={SMALL} --parallelism.data_parallel_replicate_degree=2 "
        "--compile.enable --compile.backend=aot_eager --activation_checkpoint.mode=full "
        "--parallelism.fsdp_forward_prefetch=1",
    ),
    "everything": (
        4,
        "--parallelism.data_parallel_replicate_degree=2 --activation_checkpoint.mode=selective "
        "--compile.enable --compile.backend=aot_eager --parallelism.fsdp_forward_prefetch=1 "
        "--parallelism.fsdp_backward_prefetch=2 --parallelism.defer_gradient_sync",
    ),
}


EVERY_MODEL = [name for name, (_, words) in TECHNIQUES.items() if "--compile.enable" not in words]


@pytest.mark.parametrize(
    ("technique", "model"),
    sample(
        [
            *((name, "llama3") for name in TECHNIQUES),
            *itertools.product(EVERY_MODEL, ["llama3 tied", "gpt2"]),
        ],
        *(
            (name, "llama3")
            for name in TECHNIQUES
            if "compiled" not in name and "offloaded" not in name
        ),
        ("replicated", "llama3 tied"),
        ("cpu offload, replicas, deferred", "gpt2"),
        every=3,
    ),
)
def test_technique_changes_no_number_and_no_name(pool, alone, tmp_path, model, technique):
    """Each technique by itself, and many together, with accumulation over three micro-batches.

    Compiled ones are tried on one model here, and on all in `titanlite verify`.
    """
    world, words = TECHNIQUES[technique]
    local = SAMPLES // world // 3
    sizes = [f"--training.local_batch_size={local}", f"--training.global_batch_size={SAMPLES}"]
    argv = [*MODELS[model], *sizes, *words.split()]
    for found in pool.run(one_step, argv, str(tmp_path), world=world):
        same_as_alone(found, alone[model])


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (4, f"--parallelism.fsdp_keep_whole={SMALL}"),
        (4, "--training.enable_cpu_offload"),
        pytest.param(
            2,
            "--activation_checkpoint.mode=memory_budget --compile.enable "
            "--compile.backend=aot_eager",
            marks=pytest.mark.long,
        ),
    ],
    ids=["replicated", "cpu offload", "memory budget"],
)
def test_technique_changes_no_number_with_tensor_parallel(pool, tmp_path, world, words):
    argv = [*TINY, "--model.overrides.n_kv_heads=2"]
    expected = pool.run(
        one_step, [*argv, f"--training.local_batch_size={SAMPLES}"], str(tmp_path), world=1
    )[0]
    argv += [
        f"--training.local_batch_size={2 * SAMPLES // world}",
        "--parallelism.tensor_parallel_degree=2",
    ]
    for found in pool.run(one_step, [*argv, *words.split()], str(tmp_path), world=world):
        same_as_alone(found, expected)


def test_clipping_scales_by_the_global_norm(alone):
    found = alone["llama3"]
    assert found["norm"] > 0.5, "the batch must need clipping"
    for name, gradient in found["gradients"].items():
        step = (found["before"][name] - found["after"][name]) / 0.1
        assert relative_error(step, gradient * (0.5 / found["norm"])) <= 1e-5, name


def initial_weights(argv: list[str], folder: str) -> tuple[dict, dict]:
    run = trainer(argv, folder)
    local = {
        name: (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
        for name, p in run.parts[0].named_parameters()
    }
    return weights(run), local


# 70,000 elements in a matrix: more than one block of 65,536, and shards that begin inside a block.
WIDE = [*TINY, "--model.overrides.dim=280", "--model.overrides.hidden_dim=251"]


@pytest.mark.parametrize(
    "model", [WIDE, [*WIDE, "--model.overrides.tied"], PARROT], ids=["llama3", "tied", "parrot"]
)
def test_initial_weights_are_bit_equal_on_any_world_size(pool, tmp_path, model):
    expected, _ = pool.run(initial_weights, model, str(tmp_path), world=1)[0]
    for world in (2, 3, 4):
        for found, _ in pool.run(initial_weights, model, str(tmp_path), world=world):
            for name, value in expected.items():
                assert torch.equal(found[name], value), f"{name} on {world} ranks"


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_initial_values_have_the_same_bits_from_any_number_of_threads(monkeypatch, threads):
    """Of ten blocks, the last of which is not full; a fault in a thread is not lost."""
    alone, together = torch.empty(10, BLOCK - 1), torch.empty(10, BLOCK - 1)
    fill(alone, "a", normal(0.02), seed=5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    fill(together, "a", normal(0.02), seed=5)
    assert torch.equal(alone, together) and alone.unique().numel() > 0.9 * alone.numel()
    monkeypatch.setattr("titanlite.parallel.init.derive_seed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fill(together, "a", normal(0.02), seed=5)


def test_shards_and_layers_start_with_different_values(pool, tmp_path):
    ranks = pool.run(initial_weights, WIDE, str(tmp_path), world=2)
    matrices = [name for name, value in ranks[0][0].items() if value.dim() > 1]
    pieces = [local[name].flatten()[:64] for _, local in ranks for name in matrices]
    for a, b in itertools.combinations(pieces, 2):
        assert not torch.equal(a, b)


def test_seed_changes_initial_weights(pool, tmp_path):
    first, _ = pool.run(initial_weights, TINY, str(tmp_path), world=1)[0]
    other, _ = pool.run(initial_weights, [*TINY, "--debug.seed=1"], str(tmp_path), world=1)[0]
    assert all(not torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)


@pytest.mark.parametrize("tied", [False, True])
def test_initial_values_have_the_declared_spread(pool, tmp_path, tied):
    """Of every kind of parameter. What writes into the residual stream starts smaller the deeper
    its block is.
    """
    argv = [*WIDE, f"--model.overrides.tied={str(tied).lower()}"]
    found, _ = pool.run(initial_weights, argv, str(tmp_path), world=1)[0]
    spread = dict.fromkeys(["wq", "wk", "wv", "w1", "w3"], 0.02)
    spread |= {"tok_embeddings": 0.02 if tied else 1.0, "output": 280**-0.5}
    for name, value in found.items():
        *path, module, _ = name.split(".")
        if module in ("wo", "w2"):
            spread[module] = 0.02 / (2 * (int(path[1]) + 1)) ** 0.5
        if module.endswith("norm"):
            assert value.eq(1).all(), name
        else:
            assert value.std().item() == pytest.approx(spread[module], rel=0.02), name
            assert value.mean().abs() < 0.05 * value.std(), name
