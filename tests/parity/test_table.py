"""The table of `titanlite verify` as data: what it covers, and what it asks of a model."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.jobs import OUTSIDE
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.verify.command import ResultCache, fault_rows, source_files
from titanlite.verify.model_under_test import build_job, read_model
from titanlite.verify.table import (
    EXCLUDED_PAIR,
    INDUCTOR,
    LAYOUTS,
    SAMPLES,
    VARIANTS,
    choices,
    full,
    is_valid,
    pairs,
    pairs_in,
    pairwise,
)


def subject(*words: str):
    return read_model(list(words), {})


EVERYTHING = choices(list(LAYOUTS), ["plain", "tied", "frozen"])


def test_every_two_choices_that_can_meet_meet_in_about_forty_rows():
    rows = pairwise(EVERYTHING)
    assert set().union(*map(pairs_in, rows)) == pairs(EVERYTHING) - {EXCLUDED_PAIR}
    assert len(rows) <= 40 and len(set(rows)) == len(rows)
    assert rows == pairwise(EVERYTHING), "the same ones every time"


def test_the_full_table_is_a_product_in_which_all_pairs_meet():
    rows = full(EVERYTHING)
    assert len(rows) == 9 * 4 * 2 * 3 + 1, "and one row with the pair that is spared"
    assert [EXCLUDED_PAIR in pairs_in(row) for row in rows] == [False] * 216 + [True]
    assert set().union(*map(pairs_in, rows)) == pairs(EVERYTHING)


def test_only_what_nothing_shards_is_never_gathered_ahead():
    assert not is_valid({"layout": "tp2", "prefetch": "1"}) and not is_valid({"layout": "1", "reshard": "never"})
    assert is_valid({"layout": "dp2", "prefetch": "2", "reshard": "always"})


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_every_row_is_a_job_that_the_config_allows(tmp_path, name):
    model = subject("--model.name", name)
    assert model.layouts == tuple(LAYOUTS)
    for row in {*pairwise(choices(model.layouts, list(model.variants))), *INDUCTOR}:
        job = build_job(model.command_line(row, tmp_path), row.mesh.world)
        assert (job.layout, job.batch.total, job.batch.accumulation) == (row.mesh, SAMPLES, int(row.accumulation))
        assert getattr(job.model, "dropout", 0.0) == 0.0


def test_a_model_has_the_variants_that_its_fields_allow():
    assert [*subject().variants] == ["plain", "frozen", "tied"]
    assert [*subject("--model.flavor=1B").variants] == ["plain", "frozen", "untied"]
    gpt2 = subject("--model.name=gpt2")
    assert [*gpt2.variants] == ["plain", "frozen"] and gpt2.tied
    assert {*subject().variants, "untied"} == {*VARIANTS}


def test_layouts_that_a_model_cannot_have_are_left_out_and_said(monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)
    parrot = subject("--model.package=parrot", "--model.name=parrot")
    assert parrot.name == "parrot small" and not any("tp" in layout for layout in parrot.layouts)
    assert "attention heads" in parrot.refused_layouts["tp2"]
    with pytest.raises(UserError, match="no row that can show norms-not-reduced"):
        fault_rows(parrot, "norms-not-reduced")


def test_only_the_model_is_asked_for():
    with pytest.raises(ConfigError, match="--training.seq_len"):
        subject("--training.seq_len=3")
    assert subject("--config", "llama_1b.toml").name == "llama3 1B"


def test_code_of_titanlite_and_of_the_model_decides_what_a_full_run_knows(monkeypatch, tmp_path):
    names = {f"{path.parent.name}/{path.name}" for path in source_files(subject())}
    assert {"common/attention.py", "llama3/model.py", "verify/table.py", "optim/grad_norm.py"} <= names
    monkeypatch.syspath_prepend(OUTSIDE)
    assert {Path(OUTSIDE) / "parrot" / name for name in ("__init__.py", "model.py")} <= source_files(
        subject("--model.package=parrot", "--model.name=parrot")
    )
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    lone = source_files(replace(subject(), modules=("alone",)))
    assert {tmp_path / "alone.py", tmp_path / "beside.py"} <= lone


def test_a_full_run_goes_on_where_it_stopped_unless_the_model_is_another(tmp_path):
    from titanlite.verify.runner import Result

    row = pairwise(EVERYTHING)[0]
    cache = ResultCache(tmp_path / "rows.jsonl", subject())
    cache.add(Result(row, "gradient of x", 1e-12, rank=0, seconds=1.0))
    cache.add(Result(INDUCTOR[0], "gradient of x", 1.0, rank=0, seconds=1.0))
    assert [*ResultCache(tmp_path / "rows.jsonl", subject()).passed] == [row], "what failed is run again"
    assert not ResultCache(tmp_path / "rows.jsonl", subject("--model.overrides.n_layers=2")).passed
