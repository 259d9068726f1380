"""The table of `titanlite verify` as data: what it covers, and for which models."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.jobs import OUTSIDE
from titanlite.cli import main
from titanlite.config.load import ConfigError
from titanlite.errors import UserError
from titanlite.registry import Rule, ones, register_model, zeros
from titanlite.registry.register import get_model
from titanlite.verify.command import (
    ResultCache,
    fault_rows,
    first_rows,
    full_table,
    further_rows,
    numbered,
    selected,
    source_files,
    table,
)
from titanlite.verify.model_under_test import build_job, read_model
from titanlite.verify.table import (
    ALL_LAYOUTS,
    BEYOND,
    EXCLUDED,
    EXTRA,
    EXTRAS,
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


def model_of(*words: str):
    return read_model(list(words), {})


ALL_CHOICES = choices(list(LAYOUTS), ["plain", "tied", "frozen"])
EXPERTS = ["--model.name=qwen3", "--model.flavor=debugmodel_moe"]


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


def test_prefetch_and_reshard_need_sharding():
    assert not is_valid({"layout": "tp2", "prefetch": "1"}) and not is_valid(
        {"layout": "1", "reshard": "never"}
    )
    assert is_valid({"layout": "dp2", "prefetch": "2", "reshard": "always"})
    assert is_valid({"layout": "cp2", "prefetch": "2"}), "parameters are sharded over its ranks too"


@pytest.mark.parametrize("layout", BEYOND)
def test_a_further_layout_meets_every_choice_in_few_rows(layout):
    split = {
        c: [*OVERRIDES[c]]
        for c, dimension in SPLIT_BY.items()
        if getattr(BEYOND[layout], dimension) > 1
    }
    of = choices([layout], ["plain", "tied", "frozen"], **split)
    rows = beyond(of)
    assert len(rows) <= max(4, len(of["schedule"])) and rows == beyond(of), (
        "the same rows every time"
    )
    assert {pair for pair in pairs(of) - EXCLUDED if ("layout", layout) in pair} <= set().union(
        *map(pairs_in, rows)
    )
    assert (rows[0].precision, rows[0].sequence) == ("float64", "headtail")


def test_the_default_runs_one_row_of_each_further_layout_and_of_inductor_and_beyond_runs_all():
    rows = table(model_of())
    chosen, further = first_rows(rows), further_rows(rows)
    layouts = without_experts(BEYOND)
    assert [row.layout for n, row in chosen.items() if n in further] == [
        INDUCTOR[0].layout,
        *layouts,
    ]
    assert {row.layout for row in further.values() if row not in INDUCTOR} == {*layouts}
    assert rows == {**chosen, **further}
    assert {*INDUCTOR} <= {*further.values()}
    assert not {row.layout for row in rows.values()} & ONLY_FULL.keys()
    assert {row.layout for row in full_table(model_of()).values()} == {
        *without_experts(ALL_LAYOUTS)
    }


def test_rows_with_stages_are_those_that_the_config_allows(tmp_path):
    model, layout = model_of(), "pp2 x dp2"
    assert not is_valid({"layout": "dp2", "schedule": "GPipe"})
    gathers = [
        {"reshard": r, "prefetch": p}
        for r, p in product(OVERRIDES["reshard"], OVERRIDES["prefetch"])
    ]
    others = [{"recompute": r} for r in OVERRIDES["recompute"]] + [
        {"compile": "aot_eager"},
        {"variant": "tied"},
    ]
    for schedule, chosen in product(OVERRIDES["schedule"], gathers + others):
        row = Row(layout, schedule=schedule, **chosen)
        try:
            allowed = not build_job(model.command_line(row, tmp_path), row.mesh.world).no_effect
        except ConfigError:
            allowed = False
        assert is_valid({"layout": layout, "schedule": schedule, **chosen}) == allowed, row


def test_only_context_parallel_splits_sequences():
    assert not is_valid({"layout": "dp2", "sequence": "none"}) and is_valid(
        {"layout": "cp2", "sequence": "ulysses"}
    )
    rows = table(model_of("--model.overrides.n_kv_heads=2"))
    split = {(row.layout, row.sequence) for row in rows.values()}
    assert ("cp2", "ulysses") in split and ("cp2 x tp2", "none") in split
    assert ("cp2 x tp2", "ulysses") not in split, (
        "four ranks cannot share two heads of keys and values"
    )
    refused = model_of("--model.overrides.n_kv_heads=2").refused_layouts["cp2 x tp2 with ulysses"]
    assert (
        "2 does not divide 2 key and value heads for tensor_parallel_degree 2; legal: 1" in refused
    )


def test_only_models_with_experts_meet_layouts_and_rows_of_experts():
    model, experts = model_of("--model.name=qwen3"), model_of(*EXPERTS)
    assert [*model.layouts] == without_experts(ALL_LAYOUTS) and [*experts.layouts] == [*ALL_LAYOUTS]
    assert "debugmodel has no experts; legal: 1" in model.refused_layouts["ep2"]
    assert [*model.variants] == ["plain", "frozen", "tied"] and [*experts.variants] == [
        *model.variants,
        "bias",
    ]
    rows = first_rows(table(experts)).values()
    assert [row.extra for row in rows if row.layout == "ep2"] == ["imported", ""]
    assert not any(row.extra == "imported" for row in table(model).values())


def test_a_rounded_router_would_choose_other_experts_so_in_bf16_each_token_meets_all(tmp_path):
    model = model_of(*EXPERTS)
    chosen = {
        p: build_job(model.command_line(Row("1", precision=p), tmp_path), 1).model
        for p in OVERRIDES["precision"]
    }
    assert [flavor.top_k for flavor in chosen.values()] == [2, 2, 8, 8]


@pytest.mark.parametrize("name", ["llama3", "gpt2", "experts"])
def test_every_row_is_a_valid_config(tmp_path, name):
    model = model_of(*(EXPERTS if name == "experts" else ["--model.name", name]))
    assert [*model.layouts] == (
        [*ALL_LAYOUTS] if name == "experts" else without_experts(ALL_LAYOUTS)
    )
    for row in {*table(model).values(), *full_table(model).values()}:
        job = build_job(model.command_line(row, tmp_path), row.mesh.world)
        layout = replace(row.mesh, experts=name == "experts")
        assert (job.layout, job.batch.total, job.batch.accumulation) == (
            layout,
            SAMPLES,
            int(row.accumulation),
        )
        assert getattr(job.model, "dropout", 0.0) == 0.0 and not job.no_effect
    assert {"", *(row.extra for row in EXTRA)} == EXTRAS.keys()


def test_variants_follow_from_the_fields_of_a_model():
    assert [*model_of().variants] == ["plain", "frozen", "tied"]
    assert [*model_of("--model.flavor=1B").variants] == ["plain", "frozen", "untied"]
    gpt2 = model_of("--model.name=gpt2")
    assert [*gpt2.variants] == ["plain", "frozen"] and gpt2.tied


def test_layouts_that_a_model_refuses_are_skipped_with_the_reason(monkeypatch):
    monkeypatch.syspath_prepend(OUTSIDE)
    parrot = model_of("--model.package=parrot", "--model.name=parrot")
    assert parrot.name == "parrot small" and not any("tp" in layout for layout in parrot.layouts)
    assert "attention heads" in parrot.refused_layouts["tp2"]
    assert "cp2" not in parrot.layouts and "names no core" in parrot.refused_layouts["cp2"]
    with pytest.raises(UserError, match="no row that can show norms-not-reduced"):
        fault_rows(parrot, "norms-not-reduced")


def test_only_the_model_section_can_be_set():
    with pytest.raises(ConfigError, match="--training.seq_len"):
        model_of("--training.seq_len=3")
    assert model_of("--config", "llama_1b.toml").name == "llama3 1B"


def test_only_selects_rows_by_number_and_layout():
    rows = numbered([Row("tp2"), Row("1"), Row("dp2"), Row("dp2 x tp2"), Row("tp2", "full")])
    llama = model_of()
    assert [*selected(llama, rows, "tp2, 3")] == [1, 3, 5], "with their numbers in the whole table"
    assert [*selected(llama, rows, "dp2 x tp2")] == [4]
    assert [*selected(llama, rows, "1")] == [2], "the layout of one rank"
    assert [*selected(llama, rows, "#1")] == [1] and [*selected(llama, rows, "#1, 1, 3")] == [
        1,
        2,
        3,
    ]
    for only, says in {
        "tp3,dp2": "no row tp3 (unknown)",
        "cp4": "cp4 (in --full only)",
        "6": "the rows #1 to #5, 1, dp2, tp2, dp2 x tp2",
        "": '"" names no row; legal: the rows #1 to #5',
    }.items():
        with pytest.raises(UserError) as caught:
            selected(llama, rows, only)
        assert says in str(caught.value)


def test_a_wrong_table_is_refused_once_with_every_parameter_and_row_that_does_not_fit(
    monkeypatch, capsys
):
    monkeypatch.syspath_prepend(OUTSIDE)
    spec = get_model("parrot", "parrot")
    rules = (
        *spec.rules(None)[1:],
        Rule("norm.bias", zeros, "norm"),
        Rule("layers.*.k_norm", ones, "norm"),
    )
    register_model(replace(spec, rules=lambda c: rules))
    try:
        code = main(["verify", "--model.package=parrot", "--model.name=parrot"])
    finally:
        register_model(spec)
    out, err = capsys.readouterr()
    assert code == 2 and not out and err.count("does not cover") == 1
    for fault in (
        "tok_embeddings.weight matches no row",
        "norm.bias matches no p",
        "layers.*.k_norm matches no p",
    ):
        assert fault in err


def test_cached_results_depend_on_the_code_of_titanlite_and_the_model(monkeypatch, tmp_path):
    names = {f"{path.parent.name}/{path.name}" for path in source_files(model_of())}
    assert {
        "common/attention.py",
        "llama3/model.py",
        "verify/table.py",
        "verify/table.toml",
        "optim/grad_norm.py",
    } <= names
    monkeypatch.syspath_prepend(OUTSIDE)
    assert {
        Path(OUTSIDE) / "parrot" / name for name in ("__init__.py", "model.py")
    } <= source_files(model_of("--model.package=parrot", "--model.name=parrot"))
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
