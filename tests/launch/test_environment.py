"""scripts/environment.py: the first start makes `.venv`, concurrent starts wait, later starts find it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.launch.run import ROOT, environment

BACKEND = '''
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    """The smallest editable wheel, so that pip needs no network."""
    name = "titanlite-0.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "titanlite-0.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: titanlite\\nVersion: 0.0\\n")
        tags = "Root-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\\nGenerator: test\\n{tags}")
        wheel.writestr(f"{info}/RECORD", "")
    return name

build_wheel = build_editable
'''


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Return a checkout of an empty project with scripts/environment.py."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/environment.py", tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "titanlite"\nversion = "0.0"\ndependencies = ["torch>=2.11,<2.16"]\n'
    )
    return tmp_path


def start(checkout: Path, **environ: str) -> subprocess.Popen:
    command = [sys.executable, str(checkout / "scripts/environment.py")]
    return subprocess.Popen(
        command, env=environment(**environ), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=checkout
    )


def test_of_two_starts_one_makes_the_environment_and_the_next_finds_it(checkout):
    first, second = start(checkout), start(checkout)
    outputs = [process.communicate(timeout=120) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    expected = str(checkout / ".venv/bin/python")
    assert [out.strip() for out, _ in outputs] == [expected] * 2
    assert sum("installing titanlite into" in error for _, error in outputs) == 1
    assert sum("waiting for it" in error for _, error in outputs) == 1
    third = start(checkout)
    out, error = third.communicate()
    assert out.strip() == expected and error == ""
    finds_torch = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    used = subprocess.run([expected, "-c", finds_torch], check=False).returncode == 0
    assert used, "the active torch is used, not downloaded again"
    (checkout / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text() + "# changed\n")
    fourth = start(checkout)
    assert "installing titanlite" in fourth.communicate()[1], "a changed project is installed again"


@pytest.mark.long
def test_a_copied_checkout_gets_an_environment_of_its_own(checkout, tmp_path_factory):
    copy = tmp_path_factory.mktemp("other") / "copy"
    for folder in (checkout, copy):
        process = start(folder)
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0 and out.strip() == str(folder / ".venv/bin/python"), error
        assert ("was made for" in error) == (folder == copy)
        if folder == checkout:
            shutil.copytree(checkout, copy, symlinks=True)
    assert (copy / ".venv/bin/pip").read_text().startswith(f"#!{copy}/")


def load(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", checkout / "scripts/environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_copied_or_moved_checkout_or_one_whose_python_changed_makes_its_environment_again(
    checkout, tmp_path_factory, monkeypatch, capsys
):
    created = []

    def create(folder: Path, clear: bool, **_: object) -> None:
        created.append((folder, clear))
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").symlink_to(sys.executable)
        load(folder.parent).site_packages().mkdir(parents=True)

    monkeypatch.setattr("venv.create", create)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess("", 0))
    load(checkout).make(dev=False)
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(checkout, other / "copied", symlinks=True)
    shutil.copytree(checkout, other / "upgraded", symlinks=True)
    assert load(checkout).is_made(dev=False), "as long as it stays where it is"
    shutil.move(checkout, other / "moved")
    for name in ("copied", "moved", "upgraded"):
        found = load(other / name)
        assert not found.is_made(dev=False)
        found.make(dev=False)
        assert f"{found.VENV} was made for {checkout} and " in capsys.readouterr().err
        assert found.is_made(dev=False) and created[-1] == (found.VENV, True)
    found.PYTHON.unlink()
    found.PYTHON.symlink_to("/bin/sh")  # such as /usr/bin/python3 after an upgrade of the system
    assert not found.is_made(dev=False)
    found.PYTHON.unlink()
    found.PYTHON.symlink_to("/none")  # such as an interpreter of pyenv that was removed
    found.make(dev=False)
    assert found.is_made(dev=False)


def test_unpacking_shows_what_has_been_unpacked(checkout, capsys, monkeypatch):
    environment = load(checkout)
    folder = environment.site_packages()
    folder.mkdir(parents=True)

    class Done:
        rounds = 0

        def wait(self, seconds: float) -> bool:
            self.rounds += 1
            (folder / f"torch{self.rounds}.so").write_bytes(bytes((3 << 20) * (self.rounds != 2)))
            return self.rounds > 3

    environment.show_unpacking(Done())
    lines = [f"titanlite: unpacking: {size} MiB so far" for size in (3, 6)]
    assert capsys.readouterr().err.splitlines() == lines, "and nothing while it does not grow"


def test_a_checkout_started_from_within_another_does_not_run_the_others_code(tmp_path):
    (tmp_path / "titanlite").mkdir()
    (tmp_path / "titanlite/__init__.py").touch()
    done = subprocess.run([ROOT / "run_train.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"{tmp_path}/titanlite would run instead of {ROOT}/titanlite" in done.stderr


def test_a_checkout_that_cannot_be_written_to_is_one_line(checkout):
    (checkout / ".venv.lock").mkdir()  # root may write into any folder, but opens none as a file
    process = start(checkout)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and len(error.splitlines()) == 1
    assert f"{checkout}/.venv cannot be made" in error and "Copy the checkout to a folder that can be" in error


def test_python_without_ensurepip_names_the_package_to_install(checkout):
    """Debian ships Python with venv, but without ensurepip, which venv needs."""
    (checkout / "ensurepip.py").write_text("raise ImportError")
    process = start(checkout, PYTHONPATH=str(checkout))
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and len(error.splitlines()) == 1
    assert "apt install python3-venv" in error and not (checkout / ".venv").exists()


TRAIN = ["train", *TINY, "--training.steps=1"]


@pytest.mark.parametrize("command", sample([["--version"], TRAIN], ["--version"]))
def test_titanlite_runs_in_the_folder_that_holds_its_checkout(tmp_path, command):
    """Python looks there first, and takes the checkout itself for a package unless the install is a path."""
    (tmp_path / "titanlite").symlink_to(ROOT)
    environ = environment(NGPU="1")
    del environ["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "-m", "titanlite", *command], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert command != TRAIN or "step 1 reached" in done.stdout
