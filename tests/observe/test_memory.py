"""Memory warnings, and the allocator settings that workers get."""

from itertools import pairwise

from titanlite.observe.memory import retries_warning
from titanlite.runtime.cluster import set_defaults


def test_allocator_retries_are_reported_once():
    warnings = [retries_warning(count, before) for before, count in pairwise((0, 0, 2, 2, 3))]
    assert [bool(line) for line in warnings] == [False, True, False, True]
    assert "2 allocator cache flushes " in warnings[1] and "1 allocator cache flush " in warnings[3]
    assert "GPU memory nearly full" in warnings[1] and "training.loss_chunks" in warnings[1]


def test_workers_get_expandable_segments_unless_the_user_set_the_variable():
    def setting(**environ: str) -> str | None:
        set_defaults(environ)
        return environ.get("PYTORCH_ALLOC_CONF")

    assert setting() == "expandable_segments:True"
    assert setting(PYTORCH_ALLOC_CONF="x") == "x" and setting(PYTORCH_CUDA_ALLOC_CONF="x") is None
