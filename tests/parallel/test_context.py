"""Context parallel: who has which tokens, its collectives, what it refuses, and all that uses it
beside a step.

tests/parity proves that its numbers equal those of one process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.checkpoint.layouts import WIDE, load_all
from tests.checkpoint.saved import SAVING, run_until
from tests.jobs import (
    FLOAT64,
    QUIET,
    TINY,
    fake_world,
    forward_backward,
    job,
    micro_batches,
    trainer,
    validated,
)
from tests.lanes import sample
from tests.models.test_gpt2 import GPT2
from tests.parallel.test_exact import SAMPLES, ragged_batch
from tests.runs import train
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.data.loader import MicroBatch
from titanlite.errors import UserError
from titanlite.parallel import context_parallel
from titanlite.parallel.build import Context, build_model
from titanlite.parallel.context_parallel import own_positions, rank_chunks
from titanlite.parallel.init import allocate
from titanlite.parallel.parallelize import parallelize
from titanlite.runtime.determinism import derive_seed, reseed
from titanlite.runtime.torch_private import compiled_graphs
from titanlite.train.generate import generate
from titanlite.train.loss import model_loss
from titanlite.verify.step_record import declared_gathers

CP2, TP2 = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"
ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
UNBALANCED = "--parallelism.context_parallel_load_balancer=none"
EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]


@pytest.mark.parametrize("balanced", [True, False])
def test_the_chunks_of_all_ranks_are_the_sequence(balanced):
    for degree in range(1, 9):
        chunks = [
            chunk
            for rank in range(degree)
            for chunk in rank_chunks(48 * degree, degree, rank, balanced)
        ]
        assert sorted(token for chunk in chunks for token in chunk) == [*range(48 * degree)]
        ordered = context_parallel._in_order(chunks, balanced)
        assert [token for chunk in ordered for token in chunk] == [*range(48 * degree)]


def test_head_and_tail_see_as_many_tokens_on_every_rank():
    def pairs(degree: int, rank: int, balanced: bool) -> int:
        """Count the tokens and those that each sees, whole chunks at a time, as a core attends."""
        return sum(
            len(chunk) * chunk.stop for chunk in rank_chunks(16 * degree, degree, rank, balanced)
        )

    for degree in range(1, 9):
        assert {pairs(degree, rank, True) for rank in range(degree)} == {(2 * degree + 1) * 8**2}
        assert [pairs(degree, rank, False) for rank in range(degree)] == [
            (r + 1) * 16**2 for r in range(degree)
        ]


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ([], [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        ([UNBALANCED], [[*range(8)], [*range(8, 16)]]),
        ([ULYSSES], [[*range(8)], [*range(8, 16)]]),
    ],
    ids=["headtail", "none", "ulysses"],
)
def test_each_rank_reads_the_places_that_the_config_says(options, own):
    found = job([*EVEN, CP2, *options], 4)
    device = torch.device("cpu")
    read = [own_positions(found, rank, device, 16) for rank in range(4)]
    assert [places.tolist() for places in read if places is not None] == [*own, *own]
    rows, second = torch.arange(2 * 4 * 16).view(2, 4, 16), torch.tensor(own[1])
    batch = MicroBatch(rows).to(device, read[1])
    assert torch.equal(batch.tokens, rows[:, 0, second]) and torch.equal(
        batch.labels, rows[:, 1, second]
    )
    assert batch.positions is not None and torch.equal(batch.positions, rows[:, 3, second])
    assert batch.documents is not None and torch.equal(batch.documents, rows[:, 2]), (
        "masks need all of them"
    )
    unmasked = MicroBatch(rows[:, :2], read[1])
    assert unmasked.documents is None and unmasked.positions is not None
    assert unmasked.positions.tolist() == [own[1]] * 2


def collectives(argv: list[str], folder: str) -> dict[str, list[int]]:
    """Return the sizes, in elements of the whole, of each collective of one step that attention
    issues.
    """
    run = trainer([*argv, f"--training.local_batch_size={SAMPLES}"], folder)
    seen: dict[str, list[int]] = {}

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args: Any = (), kwargs=None):
            result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
            if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
                seen.setdefault(name, []).append(max(args[0].numel(), result.numel()))
            elif name == "alltoall_base_":
                seen.setdefault(name, []).append(args[0].numel())
            return result

    mine = micro_batches(*ragged_batch(), run.rank_slice)
    own = run.runner.forward.own_positions(TOKENS)
    assert run.runner.forward.own_positions(TOKENS) is own, "made once per length"
    with Recorded():
        forward_backward(run, [batch.to(run.device, own) for batch in mine])
    return seen


LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 2, 2, 1, 8, 16
RECOMPUTE = "--activation_checkpoint.mode="


@pytest.mark.parametrize(
    ("option", "gathers"), [("", 1), (f"{RECOMPUTE}full", 2), (f"{RECOMPUTE}selective", 2)]
)
def test_keys_and_values_are_gathered_once_per_block_and_pass(pool, tmp_path, option, gathers):
    """One collective has both. Recomputing a block gathers them again."""
    for found in pool.run(
        collectives, [*TINY, CP2, *filter(None, [option])], str(tmp_path), world=2
    ):
        both = 2 * SAMPLES * TOKENS * KV_HEADS * HEAD_DIM
        assert found == {
            "all_gather_into_tensor": [both] * LAYERS * gathers,
            "reduce_scatter_tensor": [both] * LAYERS,
        }


def test_ulysses_exchanges_four_tensors_per_block_and_pass(pool, tmp_path):
    for found in pool.run(collectives, [*EVEN, CP2, ULYSSES], str(tmp_path), world=2):
        own = SAMPLES * TOKENS * HEADS * HEAD_DIM // 2
        assert found == {"alltoall_base_": [own] * 8 * LAYERS}, "kv heads are as many as heads here"


@pytest.mark.parametrize("option", ["", ULYSSES], ids=["allgather", "ulysses"])
def test_all_compiled_blocks_share_one_graph(option):
    """A graph for each would end the run at the ninth block."""
    compiled = ["--compile.enable", "--compile.backend=aot_eager", "--compile.components=['model']"]
    found = job([*EVEN, CP2, *compiled, *filter(None, [option]), "--model.overrides.n_layers=3"], 2)
    model, table = build_model(found)
    device, before = torch.device("cpu"), compiled_graphs()
    with fake_world(found.layout) as mesh:
        parallelize(model, Context(found, mesh, table, device))
        allocate(model, device)
        rows = torch.zeros(1, 2, TOKENS, dtype=torch.int64)
        batch = MicroBatch(rows, own_positions(found, 0, device, TOKENS))
        model_loss(model, batch, batch.tokens, chunks=1).backward()
    assert compiled_graphs() - before == 1


def validation_and_sample(argv: list[str], folder: str) -> tuple[float, str]:
    run = trainer([*argv, *FLOAT64, "--validation.enable", "--validation.steps=3"], folder)
    loss = validated(run)
    settings = run.job.config.generate.model_copy(
        update={"tokens": 9, "temperature": 0.7, "prompt": "def "}
    )
    return loss, generate(run.runner.forward, run.tokenizer, settings, 16, 0)


@pytest.mark.parametrize(
    ("world", "options"),
    sample(
        [(2, CP2), (2, f"{CP2} {ULYSSES}"), (4, f"{CP2} {TP2}"), (4, f"{CP2} {UNBALANCED}")],
        (2, CP2),
    ),
)
def test_validation_and_generation_equal_one_process(pool, tmp_path, world, options):
    """The text grows past the chunks, so that the last token changes its rank; every rank draws the
    same numbers.
    """
    (loss, text), *_ = pool.run(validation_and_sample, EVEN, str(tmp_path), world=1)
    split = pool.run(validation_and_sample, [*EVEN, *options.split()], str(tmp_path), world=world)
    assert [found[1] for found in split] == [text] * world
    assert all(found[0] == pytest.approx(loss, rel=1e-12) for found in split)


def losses(folder: Path) -> list[tuple[float, float]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]


RESHARD = "--parallelism.fsdp_reshard_after_forward=2"
TEXTS = "--training.dataset_path={}/texts"
RUNS = {
    "gpt2 with documents": (
        2,
        GPT2,
        [
            "--model.overrides.dropout=0",
            "--training.document_mask",
            "--training.dataset=text",
            TEXTS,
        ],
        1e-12,
    ),
    "stream": (2, EVEN, ["--training.dataset=c4_test", TEXTS, ULYSSES], 1e-12),
    "resharded to two": (4, EVEN, [RESHARD], 1e-12),
    "state in bfloat16": (2, EVEN, ["--optimizer.state_dtype=bfloat16"], 1e-4),
}


@pytest.mark.parametrize("name", sample(RUNS, "gpt2 with documents"))
def test_a_run_logs_the_losses_and_norms_of_one_process(pool, tmp_path, name):
    world, model, options, error = RUNS[name]
    if name == "stream":
        pytest.importorskip("datasets", reason="streaming needs the extra hf")
    if TEXTS in options:
        lines = [
            json.dumps({"text": f"{number} " + "ab" * (number % 5), "url": "x"})
            for number in range(99)
        ]
        (tmp_path / "texts").mkdir()
        (tmp_path / "texts/a.jsonl").write_text("\n".join(lines))
    argv = [
        *model,
        *FLOAT64,
        *(option.format(tmp_path) for option in options),
        "--training.global_batch_size=4",
    ]
    argv += ["--metrics.log_freq=1", "--training.steps=4", "--lr_scheduler.warmup_steps=1"]
    pool.run(
        run_until,
        [word for word in argv if word not in (RESHARD, ULYSSES)],
        str(tmp_path / "one"),
        world=1,
    )
    pool.run(run_until, [*argv, CP2], str(tmp_path / "split"), world=world)
    expected = losses(tmp_path / "one")
    assert len(expected) == 4 and losses(tmp_path / "split") == [
        pytest.approx(pair, rel=error) for pair in expected
    ]


def test_resharding_to_fewer_ranks_gathers_again_in_the_declared_order():
    again, always = (job([*EVEN, CP2, f"{RESHARD[:-1]}{how}"], 4) for how in ("2", "always"))
    model, _ = build_model(again)
    assert declared_gathers(again, model, "FB") == declared_gathers(always, model, "FB")


@pytest.mark.exhaustive
def test_the_commands_train_generate_export_and_start_from_it(tmp_path):
    """On two ranks that share sequences, but for what needs none."""
    begin = [*EVEN, CP2, "--checkpoint.enable"]
    code, out = train(begin, tmp_path / "run", NGPU="2")
    assert code == 0 and "Applied context parallel on 2 ranks" in out, out
    folders = [str(tmp_path / name) for name in ("run", "hf")]
    assert (
        main(["generate", "--checkpoint", folders[0], "--tokens", "4", "--temperature", "0"]) == 0
    )
    assert main(["checkpoint", "export", *folders]) == 0
    path = f"--checkpoint.initial_load_path={tmp_path}/hf"
    for world, options in ((1, []), (2, [CP2])):
        argv = [*QUIET, "--model.flavor=hf", path, "--training.global_batch_size=2", *options]
        code, out = train(argv, tmp_path / f"{world}", NGPU=f"{world}")
        assert code == 0 and f"loaded Hugging Face weights from {tmp_path}/hf" in out, out
    alone, split = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert split == [pytest.approx(pair, rel=1e-5) for pair in alone] and alone


@pytest.mark.long
def test_dropout_differs_between_ranks_and_resumes_bit_for_bit(pool, tmp_path):
    argv = [*GPT2, *SAVING[len(TINY) :], "--model.overrides.dropout=0.2", CP2]
    straight = pool.run(run_until, argv, str(tmp_path / "straight"), world=2)
    pool.run(run_until, argv, str(tmp_path / "cut"), 2, world=2)
    cut = pool.run(run_until, argv, str(tmp_path / "cut"), world=2)
    assert cut[0]["begun"] == 2 and cut[0]["state"] == straight[0]["state"]
    assert losses(tmp_path / "cut") == losses(tmp_path / "straight")


def seeds(argv: list[str], folder: str) -> int:
    trainer([*argv, "--training.steps=1"], folder).train()
    return torch.initial_seed()


def test_ranks_that_split_a_sequence_draw_other_masks_and_older_runs_the_same_as_before(
    pool, tmp_path
):
    of_ranks = pool.run(seeds, [*TINY, CP2], str(tmp_path), world=2)
    assert len(set(of_ranks)) == 2
    alone = pool.run(seeds, TINY, str(tmp_path), world=1)[0]
    assert alone == derive_seed("dropout", 0, 1, 0, 0, 0), "batch and tensor coordinate"
    reseed(0, 1, 0, 0, 0, 1)
    assert of_ranks[1] == torch.initial_seed()


@pytest.mark.long
def test_a_checkpoint_of_split_sequences_loads_on_any_mesh(pool, tmp_path):
    argv = [*WIDE, CP2, TP2, "--checkpoint.enable", "--training.steps=2"]
    saved = pool.run(run_until, argv, str(tmp_path / "saved"), world=4)[0]["state"]
    source = {"saved": str(tmp_path / "saved" / "checkpoint")}
    for found in pool.run(load_all, WIDE, str(tmp_path / "to"), source, world=4):
        assert found["saved"] == saved


@pytest.mark.parametrize(
    ("argv", "world", "message"),
    [
        (
            ["--training.seq_len=6"],
            2,
            "2 does not divide 6 tokens in a sequence into 2 equal chunks a rank "
            "(head and tail); legal: 1",
        ),
        (
            ["--training.seq_len=18", TP2],
            4,
            "sequence into 2 equal chunks a rank (head and tail) "
            "for tensor_parallel_degree 2; legal: 1",
        ),
        (
            ["--training.seq_len=15", UNBALANCED],
            2,
            "2 does not divide 15 tokens in a sequence; legal: 1",
        ),
        (
            ["--validation.enable", "--validation.seq_len=6"],
            2,
            "validation sequence into 2 equal chunks",
        ),
        (
            [ULYSSES, "--model.overrides.n_kv_heads=1"],
            2,
            "2 does not divide 1 key and value heads; legal: 1",
        ),
        (
            ["--model.package=parrot", "--model.name=parrot"],
            2,
            "parrot cannot split sequences: its ModelSpec names",
        ),
        (["--training.loss_chunks=9"], 2, "a sequence has 8 tokens on a rank; at most 8"),
        (
            ["--quantize.linear.float8.enable", "--training.local_batch_size=1"],
            2,
            "training.local_batch_size x training.seq_len / context_parallel_degree = 8 tokens",
        ),
        (
            ["--parallelism.context_parallel_load_balancer=ptrr"],
            2,
            "ptrr balances the masks of FlexAttention",
        ),
        (
            ["--parallelism.context_parallel_rotate_method=alltoall"],
            2,
            'must be one of "allgather", "ulysses"; alltoall passes keys and values around a ring',
        ),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_legal_degrees(argv, world, message):
    if "--model.name=parrot" in argv:
        options = [*argv, "--model.flavor=small", "--training.seq_len=16"]
    else:
        options = [*EVEN, *argv]
    with pytest.raises(ConfigError) as caught:
        job([*options, CP2], world)
    assert message in str(caught.value)


def test_legal_degrees_fit_on_the_ranks_that_other_degrees_leave():
    with pytest.raises(
        ConfigError, match=r"64 tokens .* for tensor_parallel_degree 2; legal: 1, 2, 4$"
    ):
        job([*EVEN, TP2, "--parallelism.context_parallel_degree=3", "--training.seq_len=64"], 8)


def test_an_unbalanced_split_has_nothing_to_balance_with_ulysses():
    found = job([*EVEN, CP2, ULYSSES, UNBALANCED], 2)
    assert "with ulysses: parallelism.context_parallel_load_balancer" in found.no_effect


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda model: delattr(model.layers["1"].attention, "core"),
            "layers.1.attention.core is not in the model",
        ),
        (
            lambda model: setattr(model, "attention_mask", None),
            "Llama has no method attention_mask",
        ),
    ],
)
def test_a_model_without_what_its_table_names_is_refused(spoil, message):
    found = job([*EVEN, CP2], 2)
    model, table = build_model(found)
    spoil(model)
    with fake_world(found.layout) as mesh, pytest.raises(UserError, match=message):
        context_parallel.apply(model, Context(found, mesh, table, torch.device("cpu")))
