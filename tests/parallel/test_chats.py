"""Chats are trained alike on every mesh: the ranks' windows have other numbers of trained tokens,
and the loss is over those of the global batch.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.test_chat import CHAT, PLAIN, chat_options, folder
from tests.jobs import FLOAT64, QUIET, TINY, relative_error
from tests.lanes import sample
from tests.parallel.test_lora import LAYOUTS, trained
from tests.runs import records

SGD = "--optimizer.name=SGD --optimizer.lr=0.1 --optimizer.weight_decay=0.0"
SGD += " --training.max_norm=1e9 --lr_scheduler.warmup_steps=0 --debug.seed=3"
CHATS = [CHAT, CHAT[:2], CHAT[2:], [CHAT[0], {"role": "assistant", "content": "yes " * 12}]] * 4
CONCATENATED = ["--training.packing=concatenate", "--training.no_document_mask"]


def chats(path: Path) -> list[str]:
    options = chat_options(folder(path / "chats", PLAIN, CHATS))
    return [*options, "--model.overrides.n_kv_heads=2", *SGD.split(), *FLOAT64]


def numbers(argv: list[str], path: Path) -> tuple:
    """Train; return the losses, gradient norms and weights: of SGD, so that gradients of another
    scale show.
    """
    losses, weights = trained(argv, str(path))
    return losses, [record["grad_norm"] for record in records(path)], weights


@pytest.fixture(scope="module", params=["first-fit", "concatenate"])
def alone(request, pool, tmp_path_factory) -> tuple:
    path = tmp_path_factory.mktemp(request.param)
    argv = [*chats(path), *CONCATENATED * (request.param == "concatenate")]
    sizes = ["--training.global_batch_size=4", "--training.local_batch_size=4"]
    return argv, pool.run(numbers, [*argv, *sizes], path / "alone", world=1)[0]


@pytest.mark.parametrize("layout", sample(LAYOUTS, "tp2", every=2))
def test_losses_and_gradients_of_chats_are_those_of_one_process(pool, tmp_path, alone, layout):
    argv, (losses, norms, weights) = alone
    local = 4 if layout.startswith("pp") else 1
    sizes = ["--training.global_batch_size=4", f"--training.local_batch_size={local}"]
    world = 4 if "x" in layout else 2
    ranks = pool.run(numbers, [*argv, *sizes, *LAYOUTS[layout]], tmp_path, world=world)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-12)
    assert ranks[0][1] == pytest.approx(norms, rel=1e-12)
    found: dict[str, torch.Tensor] = {}
    for _, _, parameters in ranks:
        found |= parameters
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@pytest.mark.long
@pytest.mark.parametrize("flavor", ["gemma2", "mistral"])
def test_a_class_of_transformers_is_trained_on_chats_as_by_one_process(pool, tmp_path, flavor):
    pytest.importorskip("transformers")
    data = [
        option
        for option in chat_options(folder(tmp_path / "chats", PLAIN, CHATS))
        if option not in TINY or option in QUIET
    ]
    argv = [*data, "--model.name=transformers", f"--model.flavor={flavor}", *SGD.split()]
    argv += ["--training.steps=6", "--training.global_batch_size=4"]
    losses, norms, weights = pool.run(numbers, argv, tmp_path / "alone", world=1)[0]
    assert losses[-1] < losses[0] - 0.1
    two = pool.run(numbers, [*argv, "--activation_checkpoint.mode=full"], tmp_path / "two", world=2)
    assert two[0][0] == pytest.approx(losses, rel=1e-5)
    assert two[0][1] == pytest.approx(norms, rel=1e-4)
    for name, value in weights.items():
        assert relative_error(two[0][2][name], value) < 1e-5, name
