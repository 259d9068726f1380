"""A technique sets on a model's modules what docs/extending.md lists, and no other attribute."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.jobs import MOE
from tests.messages import says
from tests.parallel.rows import on_a_fake_rank
from titanlite.models.common.attention import CausalAttention
from titanlite.models.common.decoder import Decoder
from titanlite.models.common.moe import Experts, MoE, Router
from titanlite.parallel.parallelize import parallelize

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
TITLE = "## 4. What a technique puts on your modules"
ROWS = re.findall(r"^\| `(\w+)` \| (.*?) \|.*\| (.*?) \|$", PAGE.partition(TITLE)[2], re.MULTILINE)


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: {*vars(module)} for name, module in model.named_modules()}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            "context_parallel_degree=2 tensor_parallel_degree=2",
            {"forward", "attend_last", "attention_mask"},
        ),
        ("expert_parallel_degree=2 data_parallel_shard_degree=4", {"forward"}),
        ("fsdp_keep_whole=['*norm*'] data_parallel_shard_degree=4", {"forward"}),
    ],
)
@pytest.mark.parametrize("extra", ["--activation_checkpoint.mode=full", "--compile.enable"])
def test_techniques_set_the_attributes_of_the_page_and_no_other(options, found, extra):
    argv = [*MOE, extra, *[f"--parallelism.{option}" for option in options.split()]]
    with on_a_fake_rank(argv, 4) as (model, context):
        before = attributes(model)
        ((part,), _) = parallelize(model, context)
    added = {name for path, names in attributes(part).items() for name in names - before[path]}
    added = {name for name in added if name[0] != "_"}  # those are torch's, of hooks and of FSDP2
    graphs = {name for module in (Router, MoE, Experts) for name in module.compiled_methods}
    compiled = graphs if extra == "--compile.enable" else set()
    assert added == found | compiled | {"context"}
    assert added - graphs <= {name for name, _, _ in ROWS}
    says(PAGE, "`compiled_methods`", "`Router`, `MoE`, `Experts`")


def test_classes_declare_the_attributes_with_the_default_of_the_page():
    declared = {"Router": Router, "CausalAttention": CausalAttention, "Decoder": Decoder}
    checked = 0
    for attribute, where, default in ROWS:
        if cls := declared.get(where.strip("`")):
            value = getattr(cls, attribute)
            shown = {f"`{value}`", f"`{type(value).__name__}()`"}
            assert callable(value) or default in shown, attribute
            checked += 1
    assert checked == 3
    context = Router.context
    assert context.sum_over_sequence(torch.ones(2)).tolist() == [1, 1]
    assert context.runs_again() is False
