from collections.abc import Iterator

import pytest

from tests.multinode.hosts import Hosts, NoHosts


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Two hosts, or as many as the parameter; skipped with the reason where there can be none, as
    without root.
    """
    try:
        made = Hosts(getattr(request, "param", 2))
    except NoHosts as reason:
        pytest.skip(str(reason))
    yield made
    made.do("down")
