"""Experts of a class of transformers keep what their tokens need, no copy of an expert for each
token, and have the numbers of float64.
"""

from typing import Any

import torch

from titanlite.models.transformers.flavor import flavor_of
from titanlite.models.transformers.model import build

HIDDEN, INNER, EXPERTS, CHOSEN = 32, 128, 4, 2
FIELDS = {
    "model_type": "mixtral",
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
}


def test_experts_save_no_matrices_for_each_token_and_have_the_gradients_of_float64():
    torch.manual_seed(0)
    model: Any = build(flavor_of(FIELDS), 512)
    ids = torch.randint(64, (1, 512))
    saved = dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    found, used = list[list[torch.Tensor]](), 0
    for dtype in (torch.float32, torch.float64):
        model.to(dtype).zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(ids)
        if dtype == torch.float32:
            used = sum(saved.values())
        logits.square().mean().backward()
        found.append([parameter.grad.double() for parameter in model.parameters()])
    copies = 512 * CHOSEN * 3 * HIDDEN * INNER * 4
    assert used < copies / 4
    for single, double in zip(*found, strict=True):
        assert (single - double).norm() <= 1e-5 * double.norm() + 1e-12
