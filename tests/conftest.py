"""One pool of ranks for the whole session, and folders that a test may write to."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "outside"))  # the outside model's package
os.environ.setdefault("OMP_NUM_THREADS", "1")

from titanlite.verify.pool import Pool  # noqa: E402

PRELOAD = ["titanlite.train.trainer", "torch._inductor.compile_fx"]  # the latter for what compiles, in every new rank


@pytest.fixture(scope="session")
def pool():
    ranks = Pool(4, PRELOAD)
    yield ranks
    ranks.close()
