"""Numbers of one process, for rows of all files."""

from functools import cache

import pytest

from tests.parallel.rows import Row, step_of


@pytest.fixture(scope="session")
def alone(pool, tmp_path_factory):
    """Return the numbers of one process, by the options of its model."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def numbers(model, *words, preferred=()):
        (found,) = step_of(pool, Row(model, 1, " ".join(words)), folder, preferred)
        return found

    return numbers
