"""What stages on different ranks save, load, export, validate and generate is what one process
does.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import titanlite
from tests.checkpoint.layouts import LAYOUTS, save_and_load_everywhere
from tests.checkpoint.saved import SAVING, digests, joined, keeping_log, run_until
from tests.checkpoint.test_huggingface import exported
from tests.checkpoint.test_load import refused
from tests.jobs import FLOAT64, TINY, job, trainer, validated
from tests.lanes import sample
from tests.models.test_gpt2 import GPT2
from tests.parallel.test_context import losses
from tests.runs import descendants, finish, start
from tests.train.test_trainer import train_with_nan
from titanlite.checkpoint.hf.files import split
from titanlite.checkpoint.hf.names import Translation
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.manifest import read_manifest, read_state
from titanlite.cli import main
from titanlite.runtime.page import OWN_PAGE
from titanlite.train.generate import generate
from titanlite.train.trainer import Trainer

PP2, TP2 = "--parallelism.pipeline_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"
CP2, SCHEDULE = (
    "--parallelism.context_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=",
)
NARROW = "--optimizer.state_dtype=bfloat16"
SAVES = SAVING[len(TINY) :]
DROPOUT, FOUR = "--model.overrides.dropout=0.2", "--model.overrides.n_layers=4"
EVEN = [*TINY, "--model.overrides.n_kv_heads=2"]
TIE = "tok_embeddings.weight"


@pytest.mark.parametrize(
    ("world", "model", "options"),
    sample(
        [
            (2, "gpt2", PP2),
            (4, "gpt2", f"{PP2} {TP2} {NARROW} --model.freeze=['layers.1.*']"),
            (2, "gpt2", f"{PP2} {SCHEDULE}Interleaved1F1B {FOUR} --checkpoint.async_mode=disabled"),
            (4, "llama3", f"{PP2} {SCHEDULE}ZBVZeroBubble {FOUR} {NARROW}"),
        ],
        (2, "gpt2", PP2),
    ),
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    pool, tmp_path, world, model, options
):
    """With dropout in GPT-2, which also has the same embedding on its first and last stage."""
    argv = [
        *(GPT2 if model == "gpt2" else EVEN),
        *SAVES,
        *[DROPOUT] * (model == "gpt2"),
        *options.split(),
    ]
    argv += ["--training.local_batch_size=4", "--training.steps=4"]
    straight = pool.run(run_until, argv, str(tmp_path / "straight"), world=world)
    pool.run(run_until, argv, str(tmp_path / "cut"), 3, world=world)
    cut = pool.run(run_until, argv, str(tmp_path / "cut"), world=world)
    assert cut[0]["begun"] == 3 and losses(tmp_path / "cut") == losses(tmp_path / "straight")
    states = [joined([rank["state"] for rank in ranks]) for ranks in (cut, straight)]
    assert states[0] == states[1]
    holders = [rank["state"].keys() >= {f"model.{TIE}", f"optimizer.{TIE}.exp_avg"} for rank in cut]
    assert all(holders) if model == "gpt2" else not all(holders)


class DropoutInBlocks(Trainer):
    def _build_model(self) -> None:
        super()._build_model()
        for part in self.parts:
            part.dropout = torch.nn.Identity()


def log_of_a_start(argv: list[str], folder: str, kind: type[Trainer] = Trainer) -> list[str]:
    log, lines = keeping_log()
    trainer(argv, folder, log, kind)
    return lines


@pytest.mark.long
def test_a_change_of_dropout_masks_in_later_stages_is_in_the_log_of_all_ranks(pool, tmp_path):
    """The first stage has no block."""
    stages = "[['tok_embeddings','pos_embeddings'],['layers.0','layers.1','norm','output']]"
    argv = [*GPT2, *SAVES, DROPOUT, PP2, f"--parallelism.module_fqns_per_model_part={stages}"]
    argv.append("--training.local_batch_size=4")
    pool.run(run_until, [*argv, "--training.steps=1"], str(tmp_path), world=2)
    changed = [*argv, "--training.steps=2", "--parallelism.pipeline_parallel_microbatch_size=2"]
    for lines in pool.run(log_of_a_start, changed, str(tmp_path), DropoutInBlocks, world=2):
        assert any(line.startswith("dropout masks will differ") for line in lines)


@pytest.mark.long
def test_state_moves_between_stages_and_other_meshes(pool, tmp_path):
    layouts = {name: LAYOUTS[name] for name in ("one", "dp2tp2")}
    layouts |= {"pp2dp2": (4, [PP2]), "pp4": (4, ["--parallelism.pipeline_parallel_degree=4"])}
    layouts["pp2 interleaved"] = (2, [PP2, f"{SCHEDULE}Interleaved1F1B"])
    model = [*GPT2, FOUR, "--training.local_batch_size=4"]
    assert save_and_load_everywhere(pool, tmp_path, layouts, model) == []


@pytest.mark.long
def test_a_run_of_stages_resumed_without_them_equals_one_process(pool, tmp_path):
    """Two steps on PP 2 x DP 2, three on DP 2, one on PP 2 x TP 2, the rest in one process."""
    argv = [
        *GPT2,
        *SAVES,
        "--training.steps=8",
        "--training.global_batch_size=8",
        "--training.local_batch_size=4",
    ]
    argv.append("--model.overrides.dropout=0.0")
    pool.run(run_until, argv, str(tmp_path / "one"), world=1)
    for world, stop, options in ((4, 2, [PP2]), (2, 5, []), (4, 6, [PP2, TP2]), (1, None, [])):
        ranks = pool.run(run_until, [*argv, *options], str(tmp_path / "many"), stop, world=world)
    assert ranks[0]["begun"] == 6
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert [step[0] for step in many] == pytest.approx([step[0] for step in one], rel=1e-5)
    assert [step[1] for step in many] == pytest.approx([step[1] for step in one], rel=1e-4)


def loaded(argv: list[str], folder: str) -> dict[str, Any]:
    return digests(trainer(argv, folder))


@pytest.mark.long
@pytest.mark.parametrize(("world", "options"), [(2, [PP2]), (4, [PP2]), (4, [PP2, TP2])])
def test_an_export_has_the_same_bytes_as_one_process_and_starts_stages(
    pool, tmp_path, world, options
):
    argv = [*GPT2, *options]
    pool.run(exported, GPT2, str(tmp_path / "one"), "bfloat16", world=1)
    pool.run(exported, argv, str(tmp_path / "stages"), "bfloat16", world=world)
    one, stages = (
        {p.name: p.read_bytes() for p in (tmp_path / n / "out").iterdir()}
        for n in ("one", "stages")
    )
    assert one == stages and len(one) > 6
    argv += [
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={tmp_path}/one/out",
    ]
    states = pool.run(loaded, argv, str(tmp_path / "from_hf"), world=world)
    whole = pool.run(loaded, [*GPT2, *argv[-2:]], str(tmp_path / "whole"), world=1)[0]
    assert joined(states) == whole


def sends_of_an_export(argv: list[str], folder: str) -> list[int]:
    """Return how many tensors this rank sent to another while it exported."""
    sent: list[int] = []
    send = dist.send

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sent.append(tensor.numel())
        send(tensor, *args, **kwargs)

    dist.send = counted
    try:
        exported(argv, folder, "float32")
    finally:
        dist.send = send
    return sent


@pytest.mark.long
def test_a_tensor_is_sent_once_from_its_stage_to_the_rank_that_writes_it(pool, tmp_path):
    """Ranks 0 and 1 have the first stage, 2 and 3 the last; each writes every fourth file."""
    sent = pool.run(sends_of_an_export, [*GPT2, PP2], str(tmp_path), world=4)
    found = job([*GPT2, PP2], 4)
    first, translation = (
        tuple(f"{name}." for name in found.stages.names[0]),
        Translation(found.spec, found.model),
    )
    expected: list[list[int]] = [[] for _ in range(4)]
    for number, tensors in enumerate(split(translation.hf_tensors(torch.float32), 3000).values()):
        for name in (name for tensor in tensors for name in tensor.parameters):
            stage, (of_writer, replica) = int(not name.startswith(first)), divmod(number % 4, 2)
            if stage != of_writer:
                expected[2 * stage + replica].append(torch.Size(translation.shapes[name]).numel())
    assert sent == expected and all(sent)


@pytest.mark.long
def test_weights_alone_are_saved_and_loaded_by_stages(pool, tmp_path):
    argv = [*GPT2, *SAVES, PP2, "--training.steps=2", "--checkpoint.last_save_model_only"]
    state = joined(
        [rank["state"] for rank in pool.run(run_until, argv, str(tmp_path / "run"), world=2)]
    )
    saved = {name: digest for name, digest in state.items() if name.startswith("model.")}
    folder = tmp_path / "run/checkpoint/step-2"
    assert (
        read_manifest(folder).tensors.keys() == saved.keys() and read_state(folder)["numbers"] == {}
    )
    for world, options in ((2, [PP2]), (1, [])):
        argv = [*GPT2, *options, "--debug.seed=5", f"--checkpoint.initial_load_path={folder}"]
        found = joined(pool.run(loaded, argv, str(tmp_path / "next"), world=world))
        assert {name: found[name] for name in saved} == saved


@pytest.mark.long
def test_the_room_that_checkpoints_of_stages_need_is_that_of_the_whole_model(pool, tmp_path):
    argv, sizes = [*EVEN, *SAVES, "--checkpoint.keep_latest_k=1000000000"], set[str]()
    for world, options in ((1, []), (2, [PP2])):
        lines = pool.run(
            log_of_a_start, [*argv, *options], str(tmp_path / str(world)), world=world
        )[0]
        (warning,) = [line for line in lines if "room for" in line]
        sizes |= {*re.findall(r"more checkpoints of (.*);", warning)}
    assert len(sizes) == 1


@pytest.mark.long
@pytest.mark.parametrize("exclude", [[], ["optimizer"]])
def test_a_checkpoint_that_does_not_fit_a_later_stage_is_refused_on_every_rank(
    pool, tmp_path, exclude
):
    pool.run(run_until, [*GPT2, *SAVES, "--training.steps=1"], str(tmp_path), world=1)
    source, wider = str(tmp_path / "checkpoint"), "--model.overrides.n_layers=3"
    for message, untouched in pool.run(
        refused, [*GPT2, PP2, wider], str(tmp_path), source, exclude, world=2
    ):
        assert "model.layers.2.attention.wq.weight: not in the checkpoint" in message and untouched
        assert ("optimizer.layers.2" in message) == (not exclude) or "more" in message
    for message, untouched in pool.run(
        refused, [*GPT2, PP2], str(tmp_path), source, exclude, world=2
    ):
        assert message == "loaded" and not untouched


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_on_the_last_stage_stops_all_ranks_at_the_same_step(
    pool, tmp_path, rank
):
    argv = [*EVEN, PP2, "--training.steps=9", "--metrics.log_freq=9"]
    stops = pool.run(train_with_nan, argv, str(tmp_path), rank, 3, world=2)
    assert (
        stops
        == [(4, f"at step 3 the loss of rank {rank} was not finite; nothing was saved after it")]
        * 2
    )


@pytest.mark.parametrize("rank", sample(range(2), long=[0]))
def test_a_killed_rank_of_any_stage_is_named(tmp_path, rank):
    process = start([*EVEN, PP2, "--training.steps=100000"], tmp_path, NGPU="2")
    while not (tmp_path / "metrics.jsonl").is_file():
        assert process.poll() is None, finish(process)
        time.sleep(0.1)
    pids = [
        p
        for p in descendants(process.pid)
        if f"\0RANK={rank}\0" in Path(f"/proc/{p}/environ").read_text()
    ]
    os.kill(pids[0], signal.SIGKILL)
    code, out = finish(process)
    assert (
        code == 1
        and re.findall(r"rank (\d) on .* failed first", out) == [str(rank)]
        and "SIGKILL" in out
    )


def validation_and_sample(argv: list[str], folder: str) -> tuple[float, list[int]]:
    """Validate between two steps and generate after them; return the loss and the tokens."""
    argv = [*argv, *FLOAT64, "--validation.enable", "--validation.steps=3", "--training.steps=2"]
    run = trainer(argv, folder)
    run.train()
    settings = run.job.config.generate.model_copy(
        update={"tokens": 9, "temperature": 0.0, "prompt": "def "}
    )
    tokens: list[int] = []
    forward = run.runner.forward
    generate(forward, run.tokenizer, settings, 16, 0, show=lambda text: tokens.append(text[-1]))
    loss = validated(run)
    assert all(part.training for part in run.parts)
    if dist.get_rank() == 0:
        records = [
            json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()
        ]
        (logged,) = [record["validation_loss"] for record in records if "validation_loss" in record]
        assert logged == pytest.approx(loss, rel=1e-12)
    return loss, tokens


def untrained(argv: list[str], folder: str) -> tuple[float, list[list[float]]]:
    """Validate and generate with the initial weights of a model with dropout; return the loss, and
    what is drawn from on a rank that has the last stage."""
    run = trainer([*argv, *FLOAT64, "--validation.enable", "--validation.steps=3"], folder)
    before = OWN_PAGE.sequence
    loss = validated(run)
    assert OWN_PAGE.sequence - before >= 3, (
        "each batch is progress, or a long validation would count as hung"
    )
    assert all(part.training for part in run.parts)
    settings = run.job.config.generate.model_copy(
        update={"tokens": 3, "temperature": 0.0, "prompt": "def "}
    )
    logits: list[list[float]] = []

    def narrow(seen: torch.Tensor) -> torch.Tensor:
        logits.append(seen.tolist())
        return seen

    generate(run.runner.forward, run.tokenizer, settings, 16, 0, narrow)
    assert all(part.training for part in run.parts)
    return loss, logits


def test_validation_and_generation_draw_no_dropout_on_any_stage(pool, tmp_path):
    argv = [*GPT2, FOUR, "--model.overrides.dropout=0.5", "--training.local_batch_size=4"]
    (loss, expected), *_ = pool.run(untrained, argv, str(tmp_path), world=1)
    ranks = pool.run(untrained, [*argv, PP2, f"{SCHEDULE}Interleaved1F1B"], str(tmp_path), world=2)
    assert all(found == pytest.approx(loss, rel=1e-12) for found, _ in ranks)
    (logits,) = [logits for _, logits in ranks if logits]
    assert torch.allclose(torch.tensor(logits), torch.tensor(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("world", "options"),
    sample(
        [
            (2, PP2),
            (4, f"{PP2} {SCHEDULE}ZBVZeroBubble"),
            (2, f"{PP2} {SCHEDULE}Interleaved1F1B --training.document_mask"),
            (4, f"{PP2} {CP2}"),
            (4, f"{PP2} {TP2} --parallelism.disable_loss_parallel"),
            (4, f"{PP2} {TP2}"),
        ],
        (2, PP2),
        every=2,
    ),
)
def test_validation_and_generation_equal_one_process(pool, tmp_path, world, options):
    """Sequences of other lengths and batches of other sizes than in training, also on ranks with
    two stages.
    """
    argv = [*EVEN, FOUR, "--training.global_batch_size=8", "--training.local_batch_size=4"]
    argv += ["--validation.local_batch_size=3", "--validation.seq_len=24"]
    if "document_mask" in options:  # documents that end inside the windows
        (tmp_path / "a.jsonl").write_text(
            "".join(f'{{"text": "{"abc" * (n % 4)} {n}"}}\n' for n in range(99))
        )
        argv += ["--validation.dataset=text", f"--validation.dataset_path={tmp_path / 'a.jsonl'}"]
    alone = [word for word in options.split() if "training" in word]
    (loss, tokens), *_ = pool.run(validation_and_sample, [*argv, *alone], str(tmp_path), world=1)
    ranks = pool.run(validation_and_sample, [*argv, *options.split()], str(tmp_path), world=world)
    assert [found[1] for found in ranks] == [tokens] * world and len(tokens) == 9
    assert all(found[0] == pytest.approx(loss, rel=1e-12) for found in ranks)


@pytest.mark.long
def test_a_checkpoint_of_stages_is_a_model_in_one_process(pool, tmp_path, capsys):
    """For `titanlite.load` and all commands, which see no stages."""
    argv = [*GPT2, *SAVES, PP2, "--training.steps=1"]
    state = joined(
        [rank["state"] for rank in pool.run(run_until, argv, str(tmp_path / "run"), world=4)]
    )
    folder = tmp_path / "run/checkpoint/step-1"
    tensors = load_tensors(folder)
    assert {*tensors, *read_state(folder)["numbers"]} == state.keys()
    model, _ = titanlite.load(folder)
    assert all(
        torch.equal(value, tensors[f"model.{name}"]) for name, value in model.named_parameters()
    )
    placements = {name: entry.placement for name, entry in read_manifest(folder).tensors.items()}
    assert set(placements.values()) == {"dim 0 over dp_shard"}
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert main(["checkpoint", "show", str(folder)]) == 0 and "layers.1." in capsys.readouterr().out
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "hf")]) == 0
    assert main(["generate", "--checkpoint", str(folder), "--generate.tokens", "3"]) == 0
    assert main(["checkpoint", "diff", str(folder), str(folder)]) == 0
