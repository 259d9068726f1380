"""`titanlite generate`, `evaluate` and `titanlite.load`: a checkpoint of another mesh, in one
process without process groups.
"""

import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import titanlite
from tests.checkpoint.test_load import flip
from tests.data.assets import make_assets
from tests.messages import says
from tests.runs import environment, records
from titanlite.checkpoint.load import load_tensors
from titanlite.checkpoint.status import finished_message
from titanlite.config.load import load_config, parse_command_line
from titanlite.data.tokenizer import ByteTokenizer, load_tokenizer
from titanlite.tools.evaluate import Counted
from titanlite.tools.generate import Show, narrowing
from titanlite.train.generate import _sample

ASKED = ("--prompt", "def ", "--tokens", "12")


@pytest.mark.long
def test_generate_samples_from_the_newest_checkpoint_of_any_mesh(saved, run, tool):
    words = ("generate --config", saved / "config.toml", *ASKED, "--temperature=0")
    out = tool(*words)
    says(out, "step-3")
    assert out.startswith("def ")
    os.truncate(run / "checkpoint/step-3/state.json", 3)
    says(tool(*words, "--checkpoint", run / "checkpoint"), f"{run}/checkpoint/step-2")
    flip(run / "checkpoint/step-2/rank-0.safetensors", 5000)
    os.truncate(run / "checkpoint/step-1/state.json", 3)
    for step, why in ((2, "checksum"), (1, "state.json: 3 bytes"), (9, "1, 2, 3")):
        folder = run / f"checkpoint/step-{step}"
        says(tool(*words, "--checkpoint", folder, code=2), f"step-{step}", why)


def test_the_config_of_a_checkpoint_is_its_own_by_default(saved, tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = tool("generate --config", saved / "config.toml", *ASKED)
    for folder in (saved, saved / "checkpoint", saved / "checkpoint/step-3"):
        assert tool("generate", folder, *ASKED) == expected
    assert tool("generate --checkpoint", saved, *ASKED) == expected
    says(tool("generate --checkpoint", saved, saved, code=2), "two places")
    says(tool("generate The quick", code=2), "--prompt 'The quick'")
    says(tool("generate", code=2), "outputs/checkpoint")
    out = tool("generate --config debug.toml --job.dump_folder=other", code=2)
    says(out, "other/checkpoint")
    assert len(out.splitlines()) == 1
    (tmp_path / "outputs").symlink_to(saved)
    words = ("generate --generate.prompt", "def ", "--generate.tokens", 12)
    assert tool(*words).splitlines()[:-1] == expected.splitlines()[:-1]
    for named in (saved / "config.toml", saved / "checkpoint/step-3/config.toml"):
        says(tool("generate --checkpoint", named, code=2), f"{named} is a file")


def test_a_small_model_has_one_thread_unless_the_user_gave_another_number(saved, tool, monkeypatch):
    before = torch.get_num_threads()
    try:
        for given, expected in (("2", 2), (None, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if given:
                monkeypatch.setenv("OMP_NUM_THREADS", given)
            torch.set_num_threads(2)
            tool("generate", saved, "--tokens=1")
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.long
@pytest.mark.parametrize("code", ["load", "generate"])
def test_threads_wait_without_spinning_where_a_saved_model_runs(saved, code):
    """OpenMP reads how they wait when torch is imported."""
    words = ["-c", f"import titanlite; titanlite.load({str(saved)!r})"]
    if code == "generate":
        words = ["-m", "titanlite", "generate", str(saved), "--tokens=1"]
    environ = environment(OMP_DISPLAY_ENV="verbose")
    environ.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True)
    says(done.stderr, "GOMP_SPINCOUNT = '0'")


def test_the_checkpoints_of_a_run_are_found_in_the_folder_that_its_config_names(
    run, tool, monkeypatch
):
    (run / "checkpoint").rename(run / "states")
    config = run / "config.toml"
    config.write_text(config.read_text().replace('folder = "checkpoint"', 'folder = "states"'))
    says(tool("checkpoint ls", run), "step-3")
    says(tool("generate --checkpoint", run, *ASKED), f"{run}/states/step-3")
    monkeypatch.chdir(run.parent)
    (run.parent / "outputs").symlink_to(run)
    says(tool("generate", *ASKED), "outputs/states/step-3")


def test_each_seed_draws_another_text_and_top_k_and_top_p_narrow_the_draw(saved, tool):
    def text(*words: str) -> str:
        out = tool("generate --checkpoint", saved, *ASKED, *words)
        return out.rpartition("titanlite:")[0]

    assert text() != text("--seed", "5") == text("--debug.seed", "5") != text("--seed", "6")
    several = text("--samples", "3", "--seed", "4")
    headings = re.findall(r"^----- sample (\d) of 3, seed (\d) -----$", several, re.MULTILINE)
    assert headings == [("1", "4"), ("2", "5"), ("3", "6")]
    assert text("--seed", "5") + "\n-----" in several and several.endswith(text("--seed", "6"))
    greedy = text("--temperature=0")
    for narrow in (("--top-k", "1"), ("--top-p", "1e-9")):
        assert text(*narrow, "--temperature=5") == greedy != text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("generate --top-k 0", "--top-k 0"),
        ("generate --top-p 1.5", "--top-p 1.5"),
        ("generate --top-p nan", "--top-p nan"),
        ("generate --top-k x", "--top-k: "),
        ("generate --seed x", 'debug.seed = "x"'),
        ("generate --samples 0", "--samples: "),
        ("evaluate --dataset text --dataset-path none.txt", 'dataset_path = "none.txt"'),
        ("evaluate --dataset-path none.txt", '"--dataset text"'),
        ("evaluate --dataset texd", "text?"),
        ("evaluate --validation.no_enable", "validation.enable"),
    ],
)
def test_an_option_that_cannot_be_is_named(saved, tool, words, named):
    says(tool(f"{words} --checkpoint", saved, code=2), named)


def test_top_k_and_top_p_keep_the_likeliest_tokens():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()

    def kept(top_k: int | None, top_p: float, temperature: float = 1.0) -> list[int]:
        return narrowing(temperature, top_k, top_p)(logits).isfinite().nonzero().flatten().tolist()

    assert kept(None, 1.0) == [0, 1, 2, 3] == kept(9, 1.0) and kept(2, 1.0) == [1, 3]
    assert kept(None, 0.6) == [1, 3] and kept(None, 0.75) == [1, 2, 3] and kept(None, 0.39) == [1]
    # The chances are those among the two likeliest.
    assert kept(2, 0.56) == [1] and kept(2, 0.58) == [1, 3]
    assert kept(None, 0.6, temperature=0.1) == [1] == kept(None, 0.6, temperature=1e-300)
    assert _sample(logits, 1e-300, torch.Generator()) == 1


def test_text_is_printed_as_its_tokens_come_and_never_half_a_character(capsys):
    show, seen = Show(ByteTokenizer()), []
    tokens = [*"aé€".encode(), 0xFF, *b"b\x1b"]
    for count in range(1, len(tokens) + 1):
        show(tokens[:count])
        seen.append(capsys.readouterr().out)
    assert seen == ["a", "", "é", "", "", "€", "", "\N{REPLACEMENT CHARACTER}b", "·"]


def test_evaluate_returns_the_loss_of_validation_and_bits_per_byte(saved, tool):
    (expected,) = [e["validation_loss"] for e in records(saved) if "validation_loss" in e]
    held_out = saved / "held.txt"
    words = ("evaluate", saved)
    out = tool(*words)
    found = dict(re.findall(r"^(\S.*?)  +(.*)$", out, re.MULTILINE))
    # The end of the document is the last token, and no window's label.
    windows = held_out.stat().st_size // 16
    assert float(found["loss"]) == pytest.approx(expected, abs=2e-5)
    assert float(found["bits per byte"]) == pytest.approx(expected / math.log(2), abs=2e-5)
    assert found["tokens"] == found["bytes"] == str(16 * windows)
    says(found["windows"], windows, 16)
    words = (*words, "--dataset", "text", "--dataset-path", held_out)
    assert tool(*words) == out
    says(tool(*words, "--steps", "1"), "8 of 16")
    says(tool(*words, "--steps", "1000"), f"{windows} of 16", "1,000", "8,000")


def test_a_finished_run_without_its_last_validation_names_evaluate(run):
    line = parse_command_line(["--config", f"{run}/config.toml", f"--job.dump_folder={run}"], {})
    config = load_config(line).config
    assert "evaluate" not in finished_message(config)
    (run / "metrics.jsonl").write_text('{"step": 3, "loss": 1}\n')
    says(finished_message(config), "already at step 3", f"evaluate {run}")


def test_bytes_are_those_of_the_text_without_its_ends(tmp_path):
    text = "naïve café"
    tokenizer = load_tokenizer(str(make_assets(tmp_path, [f"{text}, {text}"])))
    ids = tokenizer.encode(text)
    labels = [*ids, tokenizer.end, -100]
    counted = Counted([np.asarray([[[0] * len(labels), labels]])], tokenizer)
    assert len([*counted]) == 1
    expected = (1, len(ids) + 1, len(text.encode()))
    assert (counted.windows, counted.tokens, counted.bytes) == expected


def test_load_returns_the_saved_model_and_its_tokenizer(saved):
    model, tokenizer = titanlite.load(saved, "--training.seq_len=32")
    expected = load_tensors(saved / "checkpoint/step-3")
    assert not model.training
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[f"model.{name}"])
    assert model(torch.tensor([tokenizer.encode("x" * 32)])).shape == (1, 32, 256)
