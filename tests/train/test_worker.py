"""A worker's exit code, what it prints and what it writes for its launcher, by the kind of error."""

import errno
import json

import pytest

from tests.jobs import TINY
from titanlite.errors import RunFailed, UserError
from titanlite.fault.nonfinite import NonFinite
from titanlite.train import worker


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (UserError("no such file"), 2, "titanlite: no such file\n"),
        (RunFailed("the data ended"), 1, "titanlite: the data ended\n"),
        (NonFinite("at step 3"), 1, "titanlite: at step 3\n"),
        (OSError(errno.ENOSPC, "No space", "logs"), 1, "titanlite: [Errno 28] No space: 'logs'\n"),
        (ValueError("a bug"), 1, "Traceback"),
    ],
    ids=["user error", "failed run", "loss not finite", "full disk", "bug"],
)
def test_only_a_bug_has_a_traceback(monkeypatch, capsys, tmp_path, error, code, printed):
    def fail(*_):
        raise error

    monkeypatch.setattr(worker, "run", fail)
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert worker.main([*TINY, f"--job.dump_folder={tmp_path}"]) == code
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    name = "RunFailed" if isinstance(error, OSError) else type(error).__name__
    assert message["message"].startswith(f"{name}: ")
    assert message["extraInfo"]["is_user_error"] == (name != "ValueError")
    assert "Traceback" in message["extraInfo"]["py_callstack"]
    assert capsys.readouterr().err.startswith(printed)


def test_a_config_error_names_every_fault_and_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    assert worker.main(["--training.stepz=3", "--job.device=gpu"]) == 2
    stderr = capsys.readouterr().err
    assert "training.steps" in stderr and "job.device" in stderr and "Traceback" not in stderr
