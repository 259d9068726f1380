from tests.tools.conftest import tool  # noqa: F401
