"""The chunked loss: the same numbers and communication, and less memory, as computed."""

import gc
from collections import Counter

import pytest
import torch

from tests.jobs import (
    FLOAT64,
    PARROT,
    TINY,
    forward_backward,
    gradients,
    micro_batches,
    relative_error,
    require_close,
    trainer,
    validated,
)
from tests.lanes import sample
from tests.messages import refused
from tests.parallel.rows import EVEN, GPT2, SAMPLES, operations, ragged_batch
from titanlite.config.layout import Layout
from titanlite.data.loader import MicroBatch
from titanlite.models.llama3 import LlamaConfig
from titanlite.models.llama3.model import Llama
from titanlite.planner.counting import Counting
from titanlite.train.loss import count_valid, model_loss, token_loss_sum
from titanlite.train.report import loss_over_ranks

CHUNKS = "--training.loss_chunks"
TP2 = "--parallelism.tensor_parallel_degree=2"
GATHERED = "--parallelism.disable_loss_parallel"
NO_DROPOUT = "--model.overrides.dropout=0.0"
MODELS = {
    "llama3": TINY,
    "tied": [*TINY, "--model.overrides.tied"],
    "head frozen": [*TINY, '--model.freeze=["output.*"]'],
    "only the head trained": [*TINY, '--model.freeze=["tok_embeddings.*","layers.*","norm.*"]'],
    # Softmax ignores what a key's bias adds to all its scores: the gradient is zero but for
    # rounding.
    "gpt2": [*GPT2, NO_DROPOUT, '--model.freeze=["*.wk.bias"]'],
    "an outside model": [*PARROT, NO_DROPOUT],
}


def losses_and_gradients(argv: list[str], folder: str) -> dict[str, torch.Tensor]:
    """Return the loss and the gradients of a step, and the validation loss."""
    world = torch.distributed.get_world_size() // (2 if TP2 in argv else 1)
    argv = [*argv, f"--training.local_batch_size={SAMPLES // world}", "--validation.enable"]
    run = trainer([*argv, "--validation.steps=2", "--validation.local_batch_size=4"], folder)
    run.step = 1
    batches = micro_batches(*ragged_batch(), run.data.rank_slice)
    valid = count_valid(batches[0].labels)
    loss, _ = loss_over_ranks(forward_backward(run, batches), valid, run.runner.context.mesh.loss)
    found = gradients(run)  # before a validation
    return found | {"loss": torch.tensor(loss), "validation": torch.tensor(validated(run))}


@pytest.mark.parametrize("model", sample(MODELS, "tied", "gpt2"))
def test_any_number_of_chunks_gives_the_same_numbers(pool, tmp_path, model):
    argv = [*MODELS[model], *FLOAT64]
    (expected,) = pool.run(losses_and_gradients, argv, str(tmp_path), world=1)
    for chunks in (3, 16):  # of sixteen tokens
        given = [*argv, f"{CHUNKS}={chunks}"]
        (found,) = pool.run(losses_and_gradients, given, str(tmp_path), world=1)
        require_close(found, expected, 1e-12)


TECHNIQUES = {
    "head kept whole": "--parallelism.fsdp_keep_whole=['output.*','norm.*']",
    "offloaded": "--training.enable_cpu_offload",
    "logits gathered": f"{TP2} {GATHERED}",
}


@pytest.mark.parametrize("technique", sample(TECHNIQUES, "head kept whole"))
def test_chunks_with_other_techniques_give_the_same_numbers(pool, tmp_path, technique):
    """`titanlite verify` proves it for FSDP, HSDP, tensor parallel, recomputing and compiling as
    well.
    """
    argv = [*EVEN, *FLOAT64]
    (expected,) = pool.run(losses_and_gradients, argv, str(tmp_path), world=1)
    argv += [*TECHNIQUES[technique].split(), f"{CHUNKS}=3"]
    found = pool.run(losses_and_gradients, argv, str(tmp_path), world=2)[0]
    require_close(found, expected, 1e-10)


def test_the_head_s_gradient_is_summed_in_float32(pool, tmp_path):
    narrow = "--training.mixed_precision_param=bfloat16"
    exact, plain, chunked = (
        pool.run(losses_and_gradients, [*TINY, *more], str(tmp_path), world=1)[0]["output.weight"]
        for more in (FLOAT64, [narrow], [narrow, f"{CHUNKS}=16"])
    )
    error = relative_error(chunked.double(), exact)
    assert error <= 1.1 * relative_error(plain.double(), exact)


def collectives(argv: list[str], folder: str) -> Counter[str]:
    """Count the collectives of one step."""
    run = trainer([*argv, *FLOAT64, "--training.local_batch_size=6"], folder)
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(
        256, (2, 6 * run.job.layout.data_parallel, 16), generator=generator
    )
    with operations() as seen:
        forward_backward(run, micro_batches(tokens, labels, run.data.rank_slice))
    names = [func.overloadpacket.__name__ for func, *_ in seen if "c10d" in func.namespace]
    return Counter(name for name in names if not name.startswith(("wait", "_wrap")))


# The output layer is in the root's group: gathered once and reduced once
ALWAYS, TIED = (
    ("--parallelism.fsdp_reshard_after_forward=always", {}),
    ("--model.overrides.tied", {}),
)
# The sequence is gathered once and then cut: only the loss communicates more often, the largest
# logits and the sums of each chunk
SPLIT = (TP2, {"all_reduce": 2 * 3})
WHOLE = (f"{TP2} {GATHERED}", {"all_gather_into_tensor": 3})


@pytest.mark.parametrize(("options", "more"), sample([ALWAYS, TIED, SPLIT, WHOLE], SPLIT))
def test_chunks_add_no_collective_but_those_of_the_loss(pool, tmp_path, options, more):
    plain, chunked = (
        pool.run(collectives, [*EVEN, *options.split(), f"{CHUNKS}={n}"], str(tmp_path), world=2)[0]
        for n in (1, 4)
    )
    assert chunked == plain + Counter(more) and plain.total() > 5


VOCABULARY, DIM, BATCH, TOKENS = 128256, 4, 2, 24


def test_peak_memory_falls_as_computed():
    """Twelve bytes per logit of one chunk (log-softmax, and the gradient before and after it, in
    float32), and the head's gradient in float32 if there are several chunks."""
    model = Llama(LlamaConfig(DIM, 1, 1, 1, 8, vocab_size=VOCABULARY), TOKENS).bfloat16()
    batch = MicroBatch(
        torch.randint(VOCABULARY, (BATCH, 2, TOKENS), generator=torch.Generator().manual_seed(0))
    )
    for chunks in (1, 2, 5, 8):
        model.zero_grad()
        with Counting(Layout()) as counted:
            counted.mark("parameters", [batch.rows, *model.parameters(), *model.buffers()])
            before = counted.alive
            counted.restart()
            model_loss(model, batch, batch.tokens, chunks).backward()
        logits = BATCH * -(-TOKENS // chunks) * VOCABULARY
        computed = 12 * logits + 4 * VOCABULARY * DIM * (chunks > 1)
        assert counted.recording().peak - before == pytest.approx(computed, rel=0.02), chunks


@pytest.mark.long
def test_the_head_s_float32_gradient_ends_with_the_head_s_own_backward_pass():
    """It is as large as the head in float32: not there below the head, nor in the next
    micro-batch's forward pass.
    """
    vocabulary = 5003
    model = Llama(LlamaConfig(DIM, 1, 1, 1, 8, vocab_size=vocabulary), TOKENS).bfloat16()
    batch = MicroBatch(torch.randint(vocabulary, (BATCH, 2, TOKENS)))
    alive: list[int] = []

    def look(*_: object) -> None:
        tensors = [found for found in gc.get_objects() if type(found) is torch.Tensor]
        alive.append(
            sum(t.dtype == torch.float32 and t.shape == (vocabulary, DIM) for t in tensors)
        )

    block = model.get_submodule("layers.0")
    block.register_forward_hook(look)
    block.register_full_backward_hook(look)
    for _ in range(2):
        # Kept until the next one exists, as in a step
        loss = model_loss(model, batch, batch.tokens, chunks=2)
        look()
        loss.backward()
    assert alive == [0, 1, 0] * 2, "before the head, after its chunks, below it"


def test_a_model_that_does_not_call_its_head_is_named():
    class WithoutHead(torch.nn.Module):
        def forward(self, tokens, positions=None, documents=None, head=None):
            return torch.nn.functional.one_hot(tokens, 8).float()

    batch = MicroBatch(torch.ones(2, 2, 4, dtype=torch.int64))
    with refused("loss_chunks = 2", "WithoutHead.forward", "`head`"):
        model_loss(WithoutHead(), batch, batch.tokens, 2)
    assert model_loss(WithoutHead(), batch, batch.tokens, 1, token_loss_sum).dim() == 0
