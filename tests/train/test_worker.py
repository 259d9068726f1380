"""A worker's exit code, what it prints and what it writes for its launcher, by the kind of
error.
"""

import errno
import json
import os
import runpy
import signal
import sys
from types import ModuleType

import pytest
import torch

from tests.jobs import TINY, files_of_at_most
from tests.messages import refused, says
from titanlite.errors import RunFailed, UserError
from titanlite.runtime.rank_files import FAILED_MARK
from titanlite.train import worker


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("no such file"), 2, "titanlite: no such file\n"),
        (RunFailed("the data ended"), 1, "titanlite: the data ended\n"),
        (OSError(errno.ENOSPC, "No space", "logs"), 1, "titanlite: [Errno 28] No space: 'logs'\n"),
        (
            OSError(errno.EMFILE, "Too many open files", "a.bin"),
            1,
            "titanlite: [Errno 24] Too many open files: 'a.bin'; raise the limit of open files "
            "(ulimit -n)\n",
        ),
        (ValueError("a bug"), 1, f"{FAILED_MARK}\nTraceback"),
    ],
    ids=["user error", "failed run", "full disk", "files", "bug"],
)
def test_only_a_bug_has_a_traceback(monkeypatch, capsys, tmp_path, error, code, printed):
    def fail(*_):
        raise error

    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert worker.main([*TINY, f"--job.dump_folder={tmp_path}"]) == code
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    name = "RunFailed" if isinstance(error, OSError) else type(error).__name__
    assert message["message"].startswith(f"{name}: ")
    assert message["extraInfo"]["is_user_error"] == (name != "ValueError")
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert capsys.readouterr().err.startswith(printed)


def test_an_error_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "error.json"
    error = ValueError("a long story " * 100)
    # As if this rank were killed after 100 bytes
    with files_of_at_most(100), refused(os.strerror(errno.EFBIG), kind=OSError):
        worker.write_error_file(error, {"TORCHELASTIC_ERROR_FILE": str(path)})
    assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_key_that_needs_a_gpu_is_refused_where_none_is_found_without_a_launcher_too(
    capsys, tmp_path
):
    """The rules see the device that job.device "auto" was found to be."""
    argv = [*TINY, "--job.device=auto", f"--job.dump_folder={tmp_path}"]
    assert worker.main([*argv, "--profiling.enable_memory_snapshot"]) == 2
    says(capsys.readouterr().err, "profiling.enable_memory_snapshot = true", "on a CPU")


def test_ctrl_c_ends_a_rank_without_a_traceback_while_torch_is_imported(monkeypatch):
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> None:
            if name != "main":  # pytest asks every module for others when it shows a failure
                raise AttributeError(name)
            raise SystemExit(signal.getsignal(signal.SIGINT))

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setitem(sys.modules, "titanlite.train.worker", Importing("worker"))
    with pytest.raises(SystemExit) as at_import:
        runpy.run_module("titanlite.train", run_name="__main__")
    signal.signal(signal.SIGINT, handler)
    assert at_import.value.code == signal.SIG_DFL
