"""The table of `titanlite verify` as data: what it covers, and for which models."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.jobs import OUTSIDE
from tests.lanes import sample
from tests.messages import refused, says
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.registry import Rule, ones, register_model, zeros
from titanlite.registry.register import get_model
from titanlite.verify.command import (
    ResultCache,
    first_rows,
    full_table,
    further_rows,
    numbered,
    selected,
    source_files,
    table,
)
from titanlite.verify.model_under_test import ModelUnderTest, build_job, read_model
from titanlite.verify.table import (
    ALL_LAYOUTS,
    BEYOND,
    EXCLUDED,
    INDUCTOR,
    LAYOUTS,
    ONLY_FULL,
    OVERRIDES,
    SAMPLES,
    SPLIT_BY,
    Row,
    beyond,
    choices,
    full,
    is_valid,
    pairs,
    pairs_in,
    pairwise,
)


@cache
def model_of(*words: str) -> ModelUnderTest:
    return read_model(list(words), {})


@cache
def rows_of(*words: str) -> dict[int, Row]:
    return table(model_of(*words))


ALL_CHOICES = choices(list(LAYOUTS), ["plain", "tied", "frozen"])
EXPERTS = ("--model.name=qwen3", "--model.flavor=debugmodel_moe")
PARROT = ("--model.package=parrot", "--model.name=parrot")


def without_experts(layouts: Iterable[str]) -> list[str]:
    return [layout for layout in layouts if ALL_LAYOUTS[layout].ep == 1]


def test_every_valid_pair_occurs_in_about_forty_rows_tensor_parallel_first():
    rows = pairwise(ALL_CHOICES)
    assert set().union(*map(pairs_in, rows)) == pairs(ALL_CHOICES) - EXCLUDED
    assert len(rows) <= 40 and len(set(rows)) == len(rows)
    assert rows == pairwise(ALL_CHOICES), "the same rows every time"
    splits = ["tp" in row.layout for row in rows]
    assert splits == sorted(splits, reverse=True), "these show mistakes in a model's table"


def test_the_full_table_is_a_product_with_all_pairs():
    rows = full(ALL_CHOICES)
    assert len(rows) == 8 * 4 * 2 * 3 + 3, "and one row with each excluded pair"
    assert [len(EXCLUDED & pairs_in(row)) for row in rows] == [0] * 192 + [1] * 3
    assert set().union(*map(pairs_in, rows)) == pairs(ALL_CHOICES)


@pytest.mark.parametrize("layout", BEYOND)
def test_a_further_layout_meets_every_choice_in_few_rows(layout):
    split = {
        c: [*OVERRIDES[c]]
        for c, dimension in SPLIT_BY.items()
        if getattr(BEYOND[layout], dimension) > 1
    }
    of = choices([layout], ["plain", "tied", "frozen"], **split)
    rows = beyond(of)
    assert len(rows) <= max(4, len(of["schedule"]))
    assert rows == beyond(of), "the same rows every time"
    met = set().union(*map(pairs_in, rows))
    assert {pair for pair in pairs(of) - EXCLUDED if ("layout", layout) in pair} <= met
    assert (rows[0].precision, rows[0].sequence) == ("float64", "headtail")


def test_the_default_runs_one_row_of_each_further_layout_and_of_inductor_and_beyond_runs_all():
    rows = rows_of()
    chosen, further = first_rows(rows), further_rows(rows)
    layouts = ["dp2", INDUCTOR[0].layout, *without_experts(BEYOND)]
    of_further = [row.layout for number, row in chosen.items() if number in further]
    assert of_further == layouts, "the first is of state on the host"
    others = [row for row in further.values() if row not in INDUCTOR]
    assert {row.layout for row in others if not row.extra} == {*without_experts(BEYOND)}
    elsewhere = {(row.layout, row.extra) for row in others if row.extra}
    assert elsewhere == {*product(("dp2", "1"), ("state on host", "state on disk"))}
    assert rows == {**chosen, **further}
    assert {*INDUCTOR} <= {*further.values()}
    assert not {row.layout for row in rows.values()} & ONLY_FULL.keys()
    full_layouts = {row.layout for row in full_table(model_of()).values()}
    assert full_layouts == {*without_experts(ALL_LAYOUTS)}


@pytest.mark.parametrize(
    "layout", sample(["pp2 x dp2", "cp2", "1", "dp2", "tp2"], "pp2 x dp2", "cp2")
)
def test_a_technique_is_valid_where_the_config_lets_it_act(tmp_path, layout):
    model = model_of()
    others: list[dict[str, str]] = [
        *({"reshard": r, "prefetch": p} for r, p in product(OVERRIDES["reshard"], "01")),
        *({column: name} for column in ("recompute", "sequence") for name in OVERRIDES[column]),
        {"compile": "aot_eager"},
        {"variant": "tied"},
    ]
    for schedule, chosen in product(OVERRIDES["schedule"], others):
        row = Row(layout, schedule=schedule, **chosen)
        try:
            allowed = not build_job(model.command_line(row, tmp_path), row.mesh.world).no_effect
        except ConfigError:
            allowed = False
        assert is_valid({"layout": layout, "schedule": schedule, **chosen}) == allowed, row


@pytest.mark.long
def test_heads_that_ranks_cannot_share_have_no_ulysses():
    even = "--model.overrides.n_kv_heads=2"
    split = {(row.layout, row.sequence) for row in rows_of(even).values()}
    assert ("cp2", "ulysses") in split and ("cp2 x tp2", "none") in split
    assert ("cp2 x tp2", "ulysses") not in split
    refusal = model_of(even).refused_layouts["cp2 x tp2 with ulysses"]
    says(refusal, "2 key and value heads", "tensor_parallel_degree 2", "legal: 1")


def test_only_models_with_experts_meet_layouts_and_rows_of_experts():
    model, experts = model_of("--model.name=qwen3"), model_of(*EXPERTS)
    assert [*model.layouts] == without_experts(ALL_LAYOUTS) and [*experts.layouts] == [*ALL_LAYOUTS]
    says(model.refused_layouts["ep2"], "debugmodel", "experts", "legal: 1")
    assert [*model.variants] == ["plain", "frozen", "tied"]
    assert [*experts.variants] == [*model.variants, "bias"]
    rows = first_rows(rows_of(*EXPERTS)).values()
    assert [row.extra for row in rows if row.layout == "ep2"] == ["imported", ""]


def test_a_rounded_router_would_choose_other_experts_so_in_bf16_each_token_meets_all(tmp_path):
    model = model_of(*EXPERTS)
    chosen = {
        p: build_job(model.command_line(Row("1", precision=p), tmp_path), 1).model_config
        for p in OVERRIDES["precision"]
    }
    assert [flavor.top_k for flavor in chosen.values()] == [2, 2, 8, 8]


TABLES = {"experts": EXPERTS, "llama3": (), "gpt2": ("--model.name=gpt2",)}


@pytest.mark.parametrize("name", sample(TABLES))
def test_every_row_is_a_valid_config(tmp_path, name):
    """Of each table here every third one of the default, and some of the rest."""
    words = TABLES[name]
    model, rows = model_of(*words), rows_of(*words)
    layouts = [*ALL_LAYOUTS] if name == "experts" else without_experts(ALL_LAYOUTS)
    assert [*model.layouts] == layouts
    for row in [*rows.values()][::3] + [*full_table(model).values()][::40]:
        job = build_job(model.command_line(row, tmp_path), row.mesh.world)
        layout = replace(row.mesh, experts=name == "experts")
        assert (job.layout, job.batch.total) == (layout, SAMPLES)
        assert job.batch.accumulation == int(row.accumulation)
        assert getattr(job.model_config, "dropout", 0.0) == 0.0 and not job.no_effect


def test_variants_follow_from_the_fields_of_a_model():
    assert [*model_of().variants] == ["plain", "frozen", "tied"]
    assert [*model_of("--model.flavor=1B").variants] == ["plain", "frozen", "untied"]
    gpt2 = model_of("--model.name=gpt2")
    assert [*gpt2.variants] == ["plain", "frozen"] and gpt2.tied


def test_layouts_that_a_model_refuses_are_skipped_with_the_reason():
    parrot = model_of(*PARROT)
    assert parrot.name == "parrot small" and not any("tp" in layout for layout in parrot.layouts)
    says(parrot.refused_layouts["tp2"], "attention heads")
    assert "cp2" not in parrot.layouts
    says(parrot.refused_layouts["cp2"], "core")
    with refused("tp2 (", "attention heads"):
        selected(parrot, rows_of(*PARROT), "tp2")


def test_only_the_model_section_can_be_set():
    with refused("--training.seq_len", kind=ConfigError):
        model_of("--training.seq_len=3")
    assert model_of("--config", "llama_1b.toml").name == "llama3 1B"


def test_only_selects_rows_by_number_and_layout():
    rows = numbered([Row("tp2"), Row("1"), Row("dp2"), Row("dp2 x tp2"), Row("tp2", "full")])
    llama = model_of()
    assert [*selected(llama, rows, "tp2, 3")] == [1, 3, 5], "with their numbers in the whole table"
    assert [*selected(llama, rows, "1")] == [2], "the layout of one rank"
    assert [*selected(llama, rows, "#1")] == [1]
    assert [*selected(llama, rows, "#1, 1, 3")] == [1, 2, 3]
    for only, said in {
        "tp3,dp2": "tp3 (unknown)",
        "cp4": "cp4 (in --full only)",
        "6": "#1 to #5, 1, dp2, tp2, dp2 x tp2",
        "": "#1 to #5",
    }.items():
        with refused(said):
            selected(llama, rows, only)


def test_a_wrong_table_is_refused_once_with_every_parameter_and_row_that_does_not_fit(capsys):
    spec = get_model("parrot", "parrot")
    rules = (
        *spec.rules(None)[1:],
        Rule("norm.bias", zeros, "norm"),
        Rule("layers.*.k_norm", ones, "norm"),
    )
    register_model(replace(spec, rules=lambda c: rules))
    try:
        code = main(["verify", *PARROT])
    finally:
        register_model(spec)
    out, err = capsys.readouterr()
    assert code == 2 and not out
    says(err, "tok_embeddings.weight matches", "norm.bias matches", "layers.*.k_norm matches")
    assert err.count("norm.bias") == 1


def test_cached_results_depend_on_the_code_of_titanlite_and_the_model(monkeypatch, tmp_path):
    names = {f"{path.parent.name}/{path.name}" for path in source_files(model_of())}
    assert {"common/attention.py", "llama3/model.py", "verify/table.toml"} <= names
    assert {"verify/table.py", "optim/grad_norm.py"} <= names
    own = {Path(OUTSIDE) / "parrot" / name for name in ("__init__.py", "model.py")}
    assert own <= source_files(model_of(*PARROT))
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    lone = source_files(replace(model_of(), modules=("alone",)))
    assert {tmp_path / "alone.py", tmp_path / "beside.py"} <= lone


def test_a_full_run_continues_where_it_stopped_with_the_same_model(tmp_path):
    from titanlite.verify.runner import Result

    row = pairwise(ALL_CHOICES)[0]
    cache = ResultCache(tmp_path / "rows.jsonl", model_of())
    cache.add(Result(row, "gradient of x", 1e-12, rank=0, seconds=1.0))
    cache.add(Result(INDUCTOR[0], "gradient of x", 1.0, rank=0, seconds=1.0))
    assert [*ResultCache(tmp_path / "rows.jsonl", model_of()).passed] == [row], (
        "failed rows run again"
    )
    assert not ResultCache(tmp_path / "rows.jsonl", model_of("--model.overrides.n_layers=2")).passed
