"""Print the interpreter that runs titanlite: the active one if it can, else that of `.venv`, which
is created if needed.

    python scripts/environment.py [--dev]

Uses only the standard library. If several nodes on a shared disk start at once, one creates `.venv`
and the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
PLACE = VENV / "titanlite-place"
HOST = "titanlite-host.pth"
LOG = VENV / "titanlite-install.log"
NEEDED = (
    "torch",
    "torchdata",
    "tensorboard",
    "pydantic",
    "numpy",
    "safetensors",
    "tokenizers",
    "rich",
    "matplotlib",
)
NEEDED += ("tomli",) if sys.version_info < (3, 11) else ()
NEEDED_DEV = (
    "pytest",
    "xdist",
    "ruff",
    "pyrefly",
    "transformers",
    "build",
    "pyarrow",
    "wandb",
    "torchao",
)
START_OVER = f"To start over: rm -r {shlex.quote(str(VENV))}"


def main() -> None:
    dev = "--dev" in sys.argv[1:]
    python = Path(sys.executable)
    if "--check" in sys.argv[1:]:
        sys.exit(not active_can_run(dev))
    if not active_can_run(dev):
        python = PYTHON
        if not can_run(dev):
            with lock():
                if not can_run(dev):  # another process may have created it while this one waited
                    make(dev)
    print(python)


def run_or_fail(command: list[str], purpose: str) -> None:
    """Run a command silently; if it fails, show what it printed."""
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        fail(f"{' '.join(command)} failed ({done.returncode}; see above): {purpose}")


def active_can_run(dev: bool) -> bool:
    """Return whether this interpreter finds this checkout's titanlite and all its dependencies."""
    sys.path[0] = os.devnull  # not the folder of this script
    spec = importlib.util.find_spec("titanlite")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parent.parent != ROOT:
        return False
    modules = NEEDED + (NEEDED_DEV if dev else ())
    return all(importlib.util.find_spec(name) for name in modules)


def can_run(dev: bool) -> bool:
    """Return whether `.venv` runs titanlite; it is run each time if another program created it,
    since that may change it.
    """
    if not made_by_others():
        return is_made(dev)
    command = [PYTHON, __file__, "--check", *["--dev"] * dev]
    return not subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


def made_by_others() -> bool:
    """Return whether another program created `.venv`, such as uv, conda or an older titanlite."""
    return PYTHON.exists() and not PLACE.exists()


def marker(dev: bool) -> Path:
    """Return the file that exists once `.venv` has everything that this pyproject.toml requires."""
    version = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:16]
    return VENV / f"titanlite-{version}{'-dev' if dev else ''}"


def is_made(dev: bool) -> bool:
    """Return whether `.venv` is complete; a copied or moved one would run another checkout's code,
    or none.
    """
    complete = PYTHON.exists() and (marker(dev).exists() or marker(True).exists())
    hosts = [Path(file.read_text().strip()) for file in VENV.glob(f"lib/*/site-packages/{HOST}")]
    return complete and made_for() == this_place() and all(host.is_dir() for host in hosts)


def this_place() -> str:
    """Return the path of `.venv` and its interpreter, such as python3.11, which a system upgrade
    may change.
    """
    return f"{ROOT}\n{os.path.basename(os.path.realpath(PYTHON))}\n"


def made_for() -> str:
    """Return the path and the interpreter that `.venv` was created for; empty if an older titanlite
    created it.
    """
    return PLACE.read_text() if PLACE.exists() else ""


def make(dev: bool) -> None:
    """Create `.venv` unless another program has, and install titanlite in it, in place."""
    if made_by_others():
        if Path(sys.prefix).resolve() != VENV.resolve() and "--again" not in sys.argv[1:]:
            os.execv(
                PYTHON, [str(PYTHON), __file__, *sys.argv[1:], "--again"]
            )  # it may be of another version
    else:
        make_empty()
    purpose = " what titanlite's tests need" if dev else " titanlite"
    if LOG.exists() and not any(VENV.glob("titanlite-" + "[0-9a-f]" * 16 + "*")):
        say(f"an earlier installation into {VENV} was not finished; it starts again")
    duration = "once" if installed("torch") else "once; a few minutes, most of it PyTorch"
    say(f"installing{purpose} into {VENV} ({duration})")
    # Float8's package is small, and any config may need it.
    target = f"{ROOT}[dev]" if dev else f"{ROOT}[float8]"
    command = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-compile",  # most of it is never imported
    ]
    if (
        not installed("pip")
        and subprocess.run([PYTHON, "-m", "ensurepip"], capture_output=True).returncode
    ):
        command = [
            "uv",
            "pip",
            "install",
            "--python",
            str(PYTHON),
        ]  # it created an environment without pip
        if not shutil.which("uv"):
            fail(f"{VENV} has no pip, and there is no uv to install with. {START_OVER}")
    command += ["-e", target]
    done = threading.Event()
    threading.Thread(target=show_progress, args=(done,), daemon=True).start()
    with LOG.open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    done.set()
    if code:
        fail(f"the installation failed: {last_line(LOG)}\n  all of it is in {LOG}. {START_OVER}")
    marker(dev).touch()


def make_empty() -> None:
    """Create `.venv` with pip and, if the active interpreter has a torch, with that."""
    try:
        import ensurepip  # noqa: F401  (Debian ships venv without it)
        import venv
    except ImportError:
        fail(
            f"{sys.executable} has no working venv module; install it (Debian, Ubuntu: "
            f"apt install python3-venv), or activate an environment with titanlite in it"
        )
    moved = made_for() not in ("", this_place())
    if moved or not (PYTHON.exists() and site_packages().exists()):  # none yet, or another Python's
        if moved:
            say(f"{VENV} was made for {' and '.join(made_for().splitlines())}, and is made again")
        try:
            venv.create(VENV, with_pip=True, symlinks=True, clear=VENV.exists())
        except (OSError, subprocess.CalledProcessError) as error:
            fail(f"{sys.executable} could not make {VENV}: {error}")
        PLACE.write_text(this_place())
    host = site_packages() / HOST
    host.unlink(missing_ok=True)
    if torch_folder := folder_of_active_torch():
        host.write_text(f"{torch_folder}\n")


def installed(module: str) -> bool:
    """Return whether `.venv` has a module."""
    return not subprocess.run(
        [PYTHON, "-c", f"import {module}"], capture_output=True, check=False
    ).returncode


def show_progress(done: threading.Event, seconds: float = 5) -> None:
    """Print how much this installation has added whenever it has grown, since pip is silent for a
    minute or more while it unpacks PyTorch; before that, print what it downloads.
    """
    size, line = installed_bytes(), ""
    before = size
    while not done.wait(seconds):
        if (now := installed_bytes()) > size + (1 << 20):
            say(f"unpacking: {now - before >> 20:,} MiB so far")
            size = now
        elif (last := last_line(LOG)) != line and "Downloading" in last:
            say(last)
            line = last


def last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").split("\n") if file.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def installed_bytes() -> int:
    # pip moves, writes and deletes files meanwhile
    return sum(
        size(Path(folder, name)) for folder, _, names in os.walk(site_packages()) for name in names
    )


def size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def folder_of_active_torch() -> str | None:
    """Return the place of the active interpreter's torch if it is in range, so that `.venv` need
    not download one.
    """
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", torch.version)
    low, high = torch_range()
    if not numbers or not low <= tuple(map(int, numbers.groups())) < high:
        return None
    return str(Path(str(torch.locate_file(""))).resolve())


def torch_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the first torch version that pyproject.toml allows, and the first that it excludes."""
    limits = re.search(
        r'"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text()
    )
    assert limits, "pyproject.toml has a line like torch>=2.11,<2.16"
    numbers = tuple(map(int, limits.groups()))
    return numbers[:2], numbers[2:]


def site_packages() -> Path:
    return (
        VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    )


class lock:
    """A file lock, which the system releases when the process ends or is killed."""

    def __enter__(self) -> None:
        try:
            self.file = (ROOT / ".venv.lock").open("w")
        except OSError as error:
            fail(
                f"{VENV} cannot be made: {error}. Copy the checkout to a folder that can be "
                "written to, or activate an environment in which this ran: "
                f"pip install -e {shlex.quote(str(ROOT))}"
            )
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            say(f"another process is making {VENV}; waiting for it")
        except OSError as error:
            say(
                f"this file system has no locks ({error.strerror}); "
                f"do not start several nodes before {VENV} is made"
            )
            return
        while True:
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(1)

    def __exit__(self, *_: object) -> None:
        self.file.close()


def say(text: str) -> None:
    print(f"titanlite: {text}", file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    say(text)
    sys.exit(2)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("stopped")
        sys.exit(130)
