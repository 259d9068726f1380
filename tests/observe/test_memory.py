"""Memory warnings, and the allocator settings that workers get."""

from itertools import pairwise

from tests.messages import says
from titanlite.observe.memory import retries_warning
from titanlite.runtime.cluster import set_defaults


def test_allocator_retries_are_reported_once():
    warnings = [retries_warning(count, before) for before, count in pairwise((0, 0, 2, 2, 3))]
    assert [bool(line) for line in warnings] == [False, True, False, True]
    says(warnings[1], "2 allocator", "training.loss_chunks")
    says(warnings[3], "1 allocator", "training.loss_chunks")


def test_workers_get_expandable_segments_unless_the_user_set_the_variable():
    def setting(**environ: str) -> str | None:
        set_defaults(environ)
        return environ.get("PYTORCH_ALLOC_CONF")

    assert setting() == "expandable_segments:True"
    assert setting(PYTORCH_ALLOC_CONF="x") == "x" and setting(PYTORCH_CUDA_ALLOC_CONF="x") is None
