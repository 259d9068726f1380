"""A pool whose ranks share one import of torchao, which takes seconds."""

import pytest

from titanlite.verify.pool import Pool


@pytest.fixture(scope="package")
def pool():
    pytest.importorskip("torchao", reason="float8 needs the extra float8")
    ranks = Pool(
        4,
        preload=[
            "titanlite.train.trainer",
            "torch._dynamo",
            "torchao.float8",
            "torch._inductor.codegen.triton",
        ],
    )
    yield ranks
    ranks.close()
