"""The chunked loss: the same numbers and communication, and less memory, as computed."""

import gc
from collections import Counter

import pytest
import torch

from tests.jobs import (
    FLOAT64,
    PARROT,
    QUIET,
    TINY,
    forward_backward,
    gradients,
    job,
    micro_batches,
    relative_error,
    trainer,
    validated,
)
from tests.lanes import sample
from tests.parallel.test_active import GPT2, seen
from tests.parallel.test_exact import SAMPLES, ragged_batch
from tests.parallel.test_tensor import EVEN, TP2, collectives
from titanlite.config.load import ConfigError
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.layout import Layout
from titanlite.models.llama3 import LlamaConfig
from titanlite.models.llama3.model import Llama
from titanlite.planner.counting import Counting
from titanlite.train.loss import count_valid, model_loss, token_loss_sum
from titanlite.train.report import loss_over_ranks

CHUNKS = "--training.loss_chunks"
MODELS = {
    "llama3": TINY,
    "tied": [*TINY, "--model.overrides.tied"],
    "head frozen": [*TINY, '--model.freeze=["output.*"]'],
    "only the head trained": [*TINY, '--model.freeze=["tok_embeddings.*","layers.*","norm.*"]'],
    # Softmax ignores what a key's bias adds to all its scores: the gradient is zero but for
    # rounding.
    "gpt2": [*QUIET, *GPT2, "--model.overrides.dropout=0.0", '--model.freeze=["*.wk.bias"]'],
    "an outside model": [*PARROT, "--model.overrides.dropout=0.0"],
}


def losses_and_gradients(argv: list[str], folder: str) -> dict:
    """Return the loss and the gradients of a step, and the validation loss."""
    validation = ["--validation.enable", "--validation.steps=2"]
    run = trainer([*argv, *validation], folder)
    run.step = 1
    batches = micro_batches(*ragged_batch(), run.rank_slice)
    loss = loss_over_ranks(
        forward_backward(run, batches), count_valid(batches[0].labels), run.mesh.loss
    )[0]
    step_gradients = gradients(run)
    held_out = validated(run)
    return {"gradients": step_gradients, "loss": loss, "validation": held_out}


def sized(world: int) -> list[str]:
    return [f"--training.local_batch_size={SAMPLES // world}", "--validation.local_batch_size=4"]


def compare(actual: dict, expected: dict, bound: float) -> None:
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert relative_error(actual["gradients"][name], gradient) <= bound, name
    for number in ("loss", "validation"):
        assert actual[number] == pytest.approx(expected[number], rel=bound), number


@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_chunks_gives_the_same_numbers(pool, tmp_path, model):
    argv = [*MODELS[model], *FLOAT64, *sized(1)]
    expected = pool.run(losses_and_gradients, argv, str(tmp_path), world=1)[0]
    for chunks in (2, 3, 16):  # of sixteen tokens
        compare(
            pool.run(losses_and_gradients, [*argv, f"{CHUNKS}={chunks}"], str(tmp_path), world=1)[
                0
            ],
            expected,
            1e-12,
        )


TECHNIQUES = {
    "compiled": (2, "--compile.enable --compile.backend=aot_eager"),
    "the loss compiled": (
        1,
        "--compile.enable --compile.backend=aot_eager --compile.components=['loss']",
    ),
    "recomputed": (2, "--activation_checkpoint.mode=full"),
    "head kept whole": (2, "--parallelism.fsdp_keep_whole=['output.*','norm.*']"),
    "offloaded": (2, "--training.enable_cpu_offload"),
    "logits gathered": (2, f"{TP2} --parallelism.disable_loss_parallel"),
    "split, head frozen": (2, f"{TP2} --model.freeze=['output.*']"),
}


@pytest.mark.parametrize("technique", sample(TECHNIQUES, *TECHNIQUES.keys() - {"compiled"}))
def test_chunks_with_other_techniques_give_the_same_numbers(pool, tmp_path, technique):
    """`titanlite verify` proves it for FSDP, HSDP, tensor parallel, recomputing and compiling as
    well.
    """
    world, options = TECHNIQUES[technique]
    split = world if TP2 in options else 1
    argv = [*EVEN, *FLOAT64, *[option for option in options.split() if "freeze" in option]]
    expected = pool.run(losses_and_gradients, [*argv, *sized(1)], str(tmp_path), world=1)[0]
    chunked = [*EVEN, *FLOAT64, *options.split(), *sized(world // split), f"{CHUNKS}=3"]
    compare(pool.run(losses_and_gradients, chunked, str(tmp_path), world=world)[0], expected, 1e-10)


def test_the_head_s_gradient_is_summed_in_float32(pool, tmp_path):
    exact = pool.run(losses_and_gradients, [*TINY, *FLOAT64, *sized(1)], str(tmp_path), world=1)[0]
    argv = [*TINY, *sized(1), "--training.mixed_precision_param=bfloat16"]

    def error(*chunks: str) -> float:
        gradient = pool.run(losses_and_gradients, [*argv, *chunks], str(tmp_path), world=1)[0][
            "gradients"
        ]["output.weight"]
        return relative_error(gradient.double(), exact["gradients"]["output.weight"])

    assert error(f"{CHUNKS}=16") <= 1.1 * error()


def test_chunks_add_no_all_gather_or_reduction(pool, tmp_path):
    """The output layer is in the root's group: gathered once and reduced once for any number of
    chunks.
    """
    for options in (
        [],
        ["--parallelism.fsdp_reshard_after_forward=always"],
        ["--model.overrides.tied"],
    ):
        plain, chunked = (seen(pool, tmp_path, *options, f"{CHUNKS}={n}")["counts"] for n in (1, 4))
        assert chunked == plain and sum(plain.values()) > 10


def test_tensor_parallel_gathers_the_sequence_once_and_then_cuts_it(pool, tmp_path):
    """Only the loss communicates more often: the largest logits and the sums of each chunk."""
    for options in ([], ["--parallelism.disable_loss_parallel"]):
        plain, chunked = (
            pool.run(
                collectives,
                [*EVEN, TP2, *options, *FLOAT64, f"{CHUNKS}={n}"],
                str(tmp_path),
                world=2,
            )[0]
            for n in (1, 4)
        )
        more = Counter(all_gather_into_tensor=3) if options else Counter(all_reduce=2 * 3)
        assert chunked == plain + more


VOCABULARY, DIM, BATCH, TOKENS = 128256, 4, 2, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_falls_as_computed(dtype):
    """Twelve bytes per logit of one chunk (log-softmax, and the gradient before and after it, in
    float32), and the head's gradient in float32 if there are several chunks."""
    model = Llama(LlamaConfig(DIM, 1, 1, 1, 8, vocab_size=VOCABULARY), TOKENS).to(dtype)
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
        computed = 12 * BATCH * -(-TOKENS // chunks) * VOCABULARY + (
            4 * VOCABULARY * DIM if chunks > 1 else 0
        )
        assert counted.recording().peak - before == pytest.approx(computed, rel=0.02), chunks


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
        loss = model_loss(
            model, batch, batch.tokens, chunks=2
        )  # kept until the next one exists, as in a step
        look()
        loss.backward()
    assert alive == [0, 1, 0] * 2, "before the head, after its chunks, below it"


def test_more_chunks_than_tokens_are_refused():
    with pytest.raises(ConfigError, match="a sequence has 16 tokens; at most 16"):
        job([*TINY, f"{CHUNKS}=17"], 1)
    with pytest.raises(ConfigError, match="at most 8"):
        job([*TINY, f"{CHUNKS}=9", "--validation.enable", "--validation.seq_len=8"], 1)


def test_a_model_that_does_not_call_its_head_is_named():
    class WithoutHead(torch.nn.Module):
        def forward(self, tokens, positions=None, documents=None, head=None):
            return torch.nn.functional.one_hot(tokens, 8).float()

    batch = MicroBatch(torch.ones(2, 2, 4, dtype=torch.int64))
    with pytest.raises(
        UserError, match="loss_chunks = 2: WithoutHead.forward does not call its `head`"
    ):
        model_loss(WithoutHead(), batch, batch.tokens, 2)
    assert model_loss(WithoutHead(), batch, batch.tokens, 1, token_loss_sum).dim() == 0


def test_the_root_s_group_is_first_in_the_schedule():
    from titanlite.parallel.fsdp_schedule import schedule

    plan = schedule(
        job([*TINY, f"{CHUNKS}=2", "--parallelism.fsdp_forward_prefetch=1"], 2), tied=False
    )
    assert plan.labels == ("norm+output", "tok_embeddings", "layers.0", "layers.1")
