"""The chunked loss: no number changes, nothing more is communicated, and memory falls as computed."""

from collections import Counter

import pytest
import torch

from tests.allocated import Allocated
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
)
from tests.parallel.test_active import GPT2, seen
from tests.parallel.test_exact import SAMPLES, ragged_batch
from tests.parallel.test_tensor import EVEN, TP2, collectives
from titanlite.config.load import ConfigError
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.models.llama3 import LlamaConfig
from titanlite.models.llama3.model import Llama
from titanlite.train.chunked_loss import model_loss
from titanlite.train.loss import count_valid, token_loss_sum
from titanlite.train.report import loss_over_ranks
from titanlite.train.validate import validation_loss

CHUNKS = "--training.loss_chunks"
MODELS = {
    "llama3": TINY,
    "tied": [*TINY, "--model.overrides.tied"],
    "head frozen": [*TINY, '--model.freeze=["output.*"]'],
    "head alone": [*TINY, '--model.freeze=["tok_embeddings.*","layers.*","norm.*"]'],
    # Softmax ignores what a key's bias adds to all its scores: the gradient is zero but for rounding.
    "gpt2": [*QUIET, *GPT2, "--model.overrides.dropout=0.0", '--model.freeze=["*.wk.bias"]'],
    "an outside model": [*PARROT, "--model.overrides.dropout=0.0"],
}


def found_in_a_step(argv: list[str], folder: str) -> dict:
    """The loss and gradients of a step, the validation's loss, and the types of the gradients."""
    validation = ["--validation.enable", "--validation.steps=2"]
    run = trainer([*argv, *validation], folder)
    run.step = 1
    mine = micro_batches(*ragged_batch(), run.share)
    loss = loss_over_ranks(forward_backward(run, mine), count_valid(mine[0].labels), run.mesh.loss)[0]
    found, chunks = gradients(run), run.job.config.training.loss_chunks
    held_out = validation_loss(run.parts, run.validation_loader, run.device, run.mesh.loss, chunks)
    return {"gradients": found, "loss": loss, "validation": held_out}


def sized(world: int) -> list[str]:
    return [f"--training.local_batch_size={SAMPLES // world}", f"--validation.local_batch_size={4 // world}"]


def compare(found: dict, expected: dict, bound: float) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert relative_error(found["gradients"][name], gradient) <= bound, name
    for number in ("loss", "validation"):
        assert found[number] == pytest.approx(expected[number], rel=bound), number


@pytest.mark.parametrize("model", MODELS)
def test_no_number_changes_in_any_number_of_chunks(pool, tmp_path, model):
    argv = [*MODELS[model], *FLOAT64, *sized(1)]
    expected = pool.run(found_in_a_step, argv, str(tmp_path), world=1)[0]
    for chunks in (2, 3, 16):  # of sixteen tokens
        compare(pool.run(found_in_a_step, [*argv, f"{CHUNKS}={chunks}"], str(tmp_path), world=1)[0], expected, 1e-12)


TECHNIQUES = {
    "compiled": (2, "--compile.enable --compile.backend=aot_eager"),
    "the loss compiled": (1, "--compile.enable --compile.backend=aot_eager --compile.components=['loss']"),
    "recomputed": (2, "--activation_checkpoint.mode=full"),
    "head kept whole": (2, "--parallelism.fsdp_keep_whole=['output.*','norm.*']"),
    "offloaded": (2, "--training.enable_cpu_offload"),
    "logits gathered": (2, f"{TP2} --parallelism.disable_loss_parallel"),
    "split, head frozen": (2, f"{TP2} --model.freeze=['output.*']"),
}


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_no_number_changes_beside_other_techniques(pool, tmp_path, technique):
    """Beside FSDP, HSDP, tensor parallel, recomputing and compiling it is proved by `titanlite verify` as well."""
    world, words = TECHNIQUES[technique]
    split = world if TP2 in words else 1
    argv = [*EVEN, *FLOAT64, *[word for word in words.split() if "freeze" in word]]
    expected = pool.run(found_in_a_step, [*argv, *sized(1)], str(tmp_path), world=1)[0]
    chunked = [*EVEN, *FLOAT64, *words.split(), *sized(world // split), f"{CHUNKS}=3"]
    compare(pool.run(found_in_a_step, chunked, str(tmp_path), world=world)[0], expected, 1e-10)


def test_in_bfloat16_the_head_s_gradient_is_summed_in_float32(pool, tmp_path):
    exact = pool.run(found_in_a_step, [*TINY, *FLOAT64, *sized(1)], str(tmp_path), world=1)[0]
    argv = [*TINY, *sized(1), "--training.mixed_precision_param=bfloat16"]

    def error(*chunks: str) -> float:
        found = pool.run(found_in_a_step, [*argv, *chunks], str(tmp_path), world=1)[0]["gradients"]["output.weight"]
        return relative_error(found.double(), exact["gradients"]["output.weight"])

    assert error(f"{CHUNKS}=16") <= 1.1 * error()


def test_nothing_more_is_gathered_or_reduced(pool, tmp_path):
    """The output's group is the root's, gathered once and reduced once however many chunks there are."""
    for words in ([], ["--parallelism.fsdp_reshard_after_forward=always"], ["--model.overrides.tied"]):
        plain, chunked = (seen(pool, tmp_path, *words, f"{CHUNKS}={n}")["counts"] for n in (1, 4))
        assert chunked == plain and sum(plain.values()) > 10


def test_under_tensor_parallel_the_sequence_is_gathered_once_and_then_cut(pool, tmp_path):
    """Only the loss itself asks more often: for the largest logits and the sums of each chunk."""
    for words in ([], ["--parallelism.disable_loss_parallel"]):
        plain, chunked = (
            pool.run(collectives, [*EVEN, TP2, *words, *FLOAT64, f"{CHUNKS}={n}"], str(tmp_path), world=2)[0]
            for n in (1, 4)
        )
        more = Counter(all_gather_into_tensor=3) if words else Counter(all_reduce=2 * 3)
        assert chunked == plain + more


VOCABULARY, DIM, BATCH, TOKENS = 128256, 4, 2, 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_memory_falls_as_computed(dtype):
    """Twelve bytes a logit of one chunk (its log-softmax, and the gradient before and after it, in float32), and the
    head's gradient in float32 as soon as there are chunks."""
    model = Llama(LlamaConfig(DIM, 1, 1, 1, 8, vocab_size=VOCABULARY), TOKENS).to(dtype)
    batch = MicroBatch(torch.randint(VOCABULARY, (BATCH, 2, TOKENS), generator=torch.Generator().manual_seed(0)))
    for chunks in (1, 2, 5, 8):
        model.zero_grad()
        with Allocated() as counted:
            model_loss(model, batch, chunks).backward()
        computed = 12 * BATCH * -(-TOKENS // chunks) * VOCABULARY + (4 * VOCABULARY * DIM if chunks > 1 else 0)
        assert counted.peak == pytest.approx(computed, rel=0.02), chunks


def test_every_chunk_needs_a_token():
    with pytest.raises(ConfigError, match="there are 16 tokens in a sequence; at most 16"):
        job([*TINY, f"{CHUNKS}=17"], 1)
    with pytest.raises(ConfigError, match="at most 8"):
        job([*TINY, f"{CHUNKS}=9", "--validation.enable", "--validation.seq_len=8"], 1)


def test_a_model_that_ignores_its_head_is_named():
    class Deaf(torch.nn.Module):
        def forward(self, tokens, positions=None, documents=None, head=None):
            return torch.nn.functional.one_hot(tokens, 8).float()

    batch = MicroBatch(torch.ones(2, 2, 4, dtype=torch.int64))
    with pytest.raises(UserError, match="loss_chunks = 2: Deaf.forward does not call its `head`"):
        model_loss(Deaf(), batch, 2)
    assert model_loss(Deaf(), batch, 1, token_loss_sum).dim() == 0


def test_what_the_root_gathers_is_first_in_the_schedule():
    from titanlite.parallel.fsdp_schedule import schedule

    plan = schedule(job([*TINY, f"{CHUNKS}=2", "--parallelism.fsdp_forward_prefetch=1"], 2), tied=False)
    assert plan.labels == ("norm+output", "tok_embeddings", "layers.0", "layers.1")
