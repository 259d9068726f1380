"""What is told of memory."""

from titanlite.launch.launcher import _worker_environment
from titanlite.launch.nodes import Nodes
from titanlite.observe.memory import Retries


def test_retries_of_the_allocator_are_told_once_when_they_happen():
    retries = Retries()
    counts = [0, 2, 2, 3]
    news = [retries.news({"memory/num_alloc_retries": count}) for count in counts]
    assert [bool(line) for line in news] == [False, True, False, True]
    assert "2 times" in news[1] and "1 time " in news[3] and "training.loss_chunks" in news[1]
    assert Retries().news({"memory/max_active(GiB)": 1.0}) == "", "a CPU has no such allocator"


def test_workers_get_expandable_segments_unless_the_user_said_otherwise():
    def given(**environ: str) -> str | None:
        return _worker_environment(Nodes(1, 0, "localhost", 0, "nothing"), 2, environ).get("PYTORCH_ALLOC_CONF")

    assert given() == "expandable_segments:True"
    assert given(PYTORCH_ALLOC_CONF="x") is None and given(PYTORCH_CUDA_ALLOC_CONF="x") is None
