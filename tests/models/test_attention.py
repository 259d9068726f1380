"""Document masks: both kinds give equal results, and one is made per micro-batch, outside of the
blocks.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from tests.jobs import TINY, job, relative_error
from tests.lanes import sample
from tests.models import small
from titanlite.models.common import attention
from titanlite.models.common.attention import CausalAttention, document_mask
from titanlite.models.gpt2 import GPT2Config
from titanlite.parallel import compile, recompute
from titanlite.parallel.build import Context
from titanlite.registry import get_model
from titanlite.runtime.torch_private import compiled_graphs

DOCUMENTS = torch.stack([torch.arange(40) // 7, torch.arange(40) // 23])
DENSE = 0.5
"""A probability of dropout: FlexAttention has none, so the mask is dense."""


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let FlexAttention run with its backward pass, as slow as it is uncompiled."""
    monkeypatch.setattr(attention, "FLEX_DEVICES", ("cpu",))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_compiled", lambda function: function)


def random_heads(kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, 40, 16, generator=generator) for heads in (4, kv_heads, kv_heads)
    )


def differ(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return (found - expected).abs().max().item() > 1e-6


@pytest.mark.parametrize(("kv_heads", "last"), [(4, 40), (2, 40), (2, 13), (2, 1)])
def test_the_last_queries_see_what_they_see_among_all(kv_heads, last, as_on_a_gpu):
    """Causally, and of documents by the masked kernel and by FlexAttention."""
    q, k, v = random_heads(kv_heads)
    core = CausalAttention()
    with torch.no_grad():
        causal = core(q, k, v)
        masked = core(q, k, v, document_mask(DOCUMENTS, q.dtype, DENSE))
        assert differ(causal, masked), "the mask must matter"
        cases: list[tuple[Any, torch.Tensor]] = [(None, causal)]
        for dropout in (0.0, DENSE):
            cases.append((document_mask(DOCUMENTS, q.dtype, dropout, last=last), masked))
        for mask, expected in cases:
            assert not differ(core(q[:, :, -last:], k, v, mask), expected[:, :, -last:])


def test_models_with_other_numbers_of_heads_compile_one_after_another():
    """The compiler takes a size that changed for a symbol."""
    compile_core = partial(torch.compile, fullgraph=True, backend="aot_eager")
    for heads, kv_heads in ((4, 2), (8, 4), (6, 6)):
        q, k, v = (torch.randn(2, n, 8, 8) for n in (heads, kv_heads, kv_heads))
        core = CausalAttention()
        assert torch.equal(compile_core(core.forward)(q, k, v), core(q, k, v))


def kept_masks(run: Callable[[], Any], *shape: int) -> int:
    """Return how many tensors of a shape are kept for the backward pass, while all results live."""
    kept = set[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-2:] == shape:
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = run()
    assert results is not None
    return len(kept)


def test_layers_and_micro_batches_share_one_dense_mask():
    q, k, v = random_heads()
    last = q[:, :, -13:].requires_grad_()
    assert kept_masks(lambda: [CausalAttention()(last, k, v) for _ in range(3)], 13, 40) == 1
    model, _ = small.built(*small.SMALL["llama3"])
    tokens = torch.zeros(2, 40, dtype=torch.int64)
    assert kept_masks(lambda: model(tokens, documents=DOCUMENTS), 40, 40) == 1 < len(model.layers)


def test_a_kernel_without_a_mask_gets_the_last_queries_in_16_bits_only():
    calls = []
    core = CausalAttention(dropout=0.25)
    core.attend_last = lambda *given: calls.append(given) or given[0]  # type: ignore[func-returns-value]
    q, k, v = (tensor.bfloat16() for tensor in random_heads())
    core(q[:, :, -13:], k, v)
    (given,) = calls
    assert torch.equal(given[0], q[:, :, -13:]) and torch.equal(given[1], k) and given[3] == 0.25
    core(q, k, v)  # all of them: the kernel of every run
    core(q[:, :, -13:].float(), k.float(), v.float())
    core(q[:, :, -13:], k, v, document_mask(DOCUMENTS, q.dtype, DENSE, last=13))
    for size in (9, 264):  # of heads that it does not take
        core(*(torch.zeros(1, 1, tokens, size, dtype=torch.bfloat16) for tokens in (1, 2, 2)))
    assert len(calls) == 1


def test_dropout_of_attention_is_never_left_out(as_on_a_gpu):
    """FlexAttention has none: it is for evaluation, and for models without dropout."""
    config = GPT2Config(32, 2, 4, vocab_size=99, max_seq_len=64, dropout=0.1)
    model, _ = small.built(get_model("gpt2"), config)
    hidden = torch.zeros(2, 40, 32)
    assert isinstance(model.attention_mask(DOCUMENTS, hidden), torch.Tensor)
    mask = model.eval().attention_mask(DOCUMENTS, hidden)
    assert isinstance(mask, BlockMask)
    q = torch.zeros(2, 4, 40, 8)
    with pytest.raises(AssertionError, match="dropout"):
        CausalAttention(0.1)(q, q, q, mask)


def recording_backend(graphs: list[Counter[str]]) -> Any:
    """Return a backend for torch.compile that splits graphs as inductor does, and lists the
    operations of each.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch.aot_autograd import aot_module_simplified

    def record(graph: Any, _: Any) -> Any:
        graphs.append(
            Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        )
        return make_boxed_func(graph.forward)

    compilers: Any = {"fw_compiler": record, "bw_compiler": record}
    return partial(
        aot_module_simplified, **compilers, partition_fn=min_cut_rematerialization_partition
    )


@pytest.mark.parametrize("mode", sample(["selective", "full"]))
def test_a_compiled_block_neither_makes_the_mask_nor_attends_twice(mode, as_on_a_gpu):
    """With recomputation too; only full recomputation attends again. One graph serves all blocks
    and documents.
    """
    from torch._dynamo import register_backend

    graphs: list[Counter[str]] = []
    register_backend(recording_backend(graphs), name=f"recorded-{mode}")
    argv = [*TINY, "--compile.enable", f"--compile.backend=recorded-{mode}"]
    argv.append(f"--activation_checkpoint.mode={mode}")
    (model, table), (dense, _) = (small.built(*small.SMALL["llama3"]) for _ in range(2))
    context = Context(job(argv, 1), None, table, torch.device("cpu"))  # type: ignore[arg-type]
    dense.attention_dropout = DENSE
    recompute.apply(model, context)
    compile.apply(model, context)
    before = compiled_graphs()
    for documents in (DOCUMENTS, DOCUMENTS.flip(0)):
        for either in (model, dense):
            either(torch.arange(80).view(2, 40) % 7, documents=documents).square().sum().backward()
    assert compiled_graphs() == before + 1
    for (name, found), expected in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert relative_error(found.grad, expected.grad) <= 1e-5, name
    forward, backward = graphs
    assert not [n for n in forward | backward if "sort" in n or "scaled_dot_product" in n]
    assert (forward["flex_attention"], backward["flex_attention_backward"]) == (1, 1)
    assert backward["flex_attention"] == (mode == "full")
