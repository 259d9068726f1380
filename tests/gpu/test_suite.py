"""The tests run on a machine with a GPU too: those that need one pass, and the others do not use
it.
"""

from __future__ import annotations

import pytest

from tests.gpu import fake_gpu


@pytest.mark.nightly
def test_tests_pass_on_a_machine_with_one_gpu(fake_gpus, tmp_path):
    pytest_here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/own")
    waiting = ("tests/train/test_waiting.py", "-k", "synchronizes and False")
    code, out = fake_gpu.program(fake_gpus, tmp_path, 1, *pytest_here, *waiting)
    assert code == 0 and out.startswith("." * 12 + " "), out
