"""scripts/environment.py: the first start makes `.venv`, concurrent starts wait, later starts find
it.
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.jobs import TINY
from tests.lanes import sample
from tests.messages import says
from tests.runs import ROOT, environment

INSTALLS = "installing titanlite"

BACKEND = '''
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    """The smallest editable wheel, so that pip needs no network."""
    name = "titanlite-0.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "titanlite-0.0.dist-info"
        wheel.writestr(f"{info}/METADATA", \
"Metadata-Version: 2.1\\nName: titanlite\\nVersion: 0.0\\n")
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


def start(checkout: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(checkout / "scripts/environment.py")],
        env=environment(**environ),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=checkout,
    )


def refusal(checkout: Path, **environ: str) -> str:
    """Return the one line in the place of an environment."""
    process = start(checkout, **environ)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 2 and out == "" and len(error.splitlines()) == 1, error
    return error


@pytest.mark.nightly
def test_of_two_starts_one_makes_the_environment_and_the_next_finds_it(checkout):
    both = start(checkout), start(checkout)
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    expected = str(checkout / ".venv/bin/python")
    assert [out.strip() for out, _ in outputs] == [expected] * 2
    errors = [error for _, error in outputs]
    assert sum(INSTALLS in error for error in errors) == 1
    assert sum("waiting" in error for error in errors) == 1
    assert start(checkout).communicate() == (f"{expected}\n", "")
    finds_torch = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    done = subprocess.run([expected, "-c", finds_torch], check=False)
    assert done.returncode == 0, "the active torch is used, not downloaded again"
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text() + "# changed\n")
    assert INSTALLS in start(checkout).communicate()[1], "a changed project is installed again"


def load(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "environment", checkout / "scripts/environment.py"
    )
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
        says(capsys.readouterr().err, found.VENV, f"for {checkout} ")
        assert found.is_made(dev=False) and created[-1] == (found.VENV, True)
    found.PYTHON.unlink()
    found.PYTHON.symlink_to("/bin/sh")  # such as /usr/bin/python3 after an upgrade of the system
    assert not found.is_made(dev=False)
    found.PYTHON.unlink()
    found.PYTHON.symlink_to("/none")  # such as an interpreter of pyenv that was removed
    found.make(dev=False)
    assert found.is_made(dev=False)


def test_an_installation_shows_what_it_downloads_and_has_unpacked(checkout, capsys):
    environment = load(checkout)
    folder = environment.site_packages()
    folder.mkdir(parents=True)
    (folder / "half.so").write_bytes(bytes(5 << 20))  # of an earlier one, which did not finish

    class Done:
        rounds = 0

        def wait(self, seconds: float) -> bool:
            self.rounds += 1
            (folder / f"torch{self.rounds}.so").write_bytes(bytes((3 << 20) * (self.rounds != 2)))
            return self.rounds > 3

    environment.LOG.write_text("Downloading torch (800 MB)\n\n")
    environment.show_progress(Done())
    lines = [f"titanlite: unpacking: {size} MiB so far" for size in (3, 6)]
    lines.insert(1, "titanlite: Downloading torch (800 MB)")
    assert capsys.readouterr().err.splitlines() == lines, "while it does not grow, the log"


@pytest.mark.nightly
def test_an_installation_prints_one_line_and_its_failure_names_the_log(checkout):
    project = checkout / "pyproject.toml"
    project.write_text(project.read_text().replace('"backend"', '"absent_backend"'))
    out, error = start(checkout).communicate(timeout=300)
    installing, failed, rest = error.splitlines()
    assert out == "" and INSTALLS in installing and "failed" in failed
    again, *_ = start(checkout).communicate(timeout=300)[1].splitlines()
    says(again, "not finished", "starts again")
    log = checkout / ".venv/titanlite-install.log"
    says(rest, log)
    says(log.read_text(), "absent_backend")


def test_a_checkout_started_from_within_another_does_not_run_the_others_code(tmp_path):
    (tmp_path / "titanlite").mkdir()
    (tmp_path / "titanlite/__init__.py").touch()
    done = shell(str(ROOT / "run_train.sh"), tmp_path, PATH=os.environ["PATH"])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    says(done.stderr, f"{tmp_path}/titanlite", f"{ROOT}/titanlite")


def test_a_checkout_that_cannot_be_written_to_is_one_line(checkout):
    (checkout / ".venv.lock").mkdir()  # root may write into any folder, but opens none as a file
    says(refusal(checkout), f"{checkout}/.venv", "Copy the checkout")


def test_python_without_ensurepip_names_the_package_to_install(checkout):
    """Debian ships Python with venv, but without ensurepip, which venv needs."""
    (checkout / "ensurepip.py").write_text("raise ImportError")
    says(refusal(checkout, PYTHONPATH=str(checkout)), "apt install python3-venv")
    assert not (checkout / ".venv").exists()


def test_titanlite_runs_in_the_folder_that_holds_its_checkout(tmp_path):
    """Python looks there first, and takes the checkout itself for a package unless the install is a
    path.
    """
    (tmp_path / "titanlite").symlink_to(ROOT)
    done = shell(shlex.join([sys.executable, "-m", "titanlite", "--version"]), tmp_path)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- environments of all kinds

STDLIB = Path(sysconfig.get_path("stdlib"))
HERE = sysconfig.get_path("purelib")


@pytest.fixture
def copy(tmp_path) -> Path:
    """Return a copy of this checkout, without its environment."""
    folder = tmp_path / "a copy ü"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "outputs", "__pycache__", "*.egg-info", "build", "tests"
    )
    shutil.copytree(ROOT, folder, symlinks=True, ignore=ignored)
    return folder


@pytest.fixture(scope="session")
def uv(tmp_path_factory) -> str:
    """Return a folder with the command uv."""
    folder = tmp_path_factory.mktemp("uv")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "uv"]
    if subprocess.run(pip, capture_output=True, check=False).returncode:
        pytest.skip("uv cannot be installed without a package index")
    return str(folder / "bin")


def shell(
    command: str, folder: Path, *first_on_path: str | Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as a person who has not activated what runs these tests."""
    system = [part for part in os.environ["PATH"].split(":") if not part.startswith(sys.prefix)]
    variables = environment(UV_OFFLINE="1", UV_NO_CONFIG="1", NGPU="1")
    variables["PATH"] = ":".join([*map(str, first_on_path), *system])
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON"):
        variables.pop(name, None)
    return subprocess.run(
        ["bash", "-c", command],
        env=variables | environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def succeeds(command: str, folder: Path, *first_on_path: str | Path, **environ: str) -> str:
    """Run a command that has nothing to complain of, and return what it prints."""
    done = shell(command, folder, *first_on_path, **environ)
    assert done.returncode == 0 and done.stderr == "", (command, done)
    return done.stdout


def make_venv(folder: Path, *options: str) -> Path:
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    return folder


def lend(environment: Path, *further: Path) -> None:
    """Let an environment have the packages of the one that runs these tests, which are large."""
    (place,) = environment.glob("lib/python3*/site-packages")
    (place / "lent.pth").write_text("\n".join(map(str, [*further, HERE])) + "\n")


def conda_like(folder: Path) -> Path:
    """Make an interpreter with a library of its own, which no venv made: there is no pyvenv.cfg."""
    (folder / "bin").mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), folder / "bin/python3")
    library = folder / "lib" / STDLIB.name
    (library / "site-packages").mkdir(parents=True)
    for path in STDLIB.iterdir():
        if path.name != "site-packages":
            (library / path.name).symlink_to(path)
    for path in STDLIB.parent.glob("libpython*"):
        (folder / "lib" / path.name).symlink_to(path)
    return folder


def files_of(folder: Path) -> set[Path]:
    return {
        path.relative_to(folder) for path in folder.rglob("*") if "__pycache__" not in path.parts
    }


TINY_RUN = shlex.join([*TINY, "--training.steps=1"])
SCRIPT = "scripts/environment.py"


@pytest.mark.nightly
def test_an_environment_of_uv_trains_by_run_train_and_stays_what_uv_made(copy, uv):
    succeeds(f"uv venv -q --python {shlex.quote(sys.executable)}", copy, uv)
    lend(copy / ".venv")
    succeeds("uv pip install -q --no-deps --no-build-isolation -e .", copy, uv)
    assert not list(copy.glob(".venv/bin/pip*"))
    before = files_of(copy / ".venv")
    version = "uv run --no-sync titanlite --version"
    shell(version, copy, uv)
    out = succeeds(f"./run_train.sh {TINY_RUN}", copy, uv)
    says(out, "step 1 reached", f"{copy}/.venv/bin/titanlite' plot")
    assert files_of(copy / ".venv") == before
    assert shell(version, copy, uv).returncode == 0


@pytest.mark.nightly
def test_uv_run_trains_in_a_checkout_and_uvx_runs_titanlite_without_one(copy, uv, tmp_path):
    """As README says. Packages of 3 GB come from the index, and are removed again."""
    online = {"UV_OFFLINE": "0", "UV_PYTHON": sys.executable, "UV_CACHE_DIR": f"{tmp_path}/cache"}
    try:
        for command, found in {
            f"uv run titanlite train {TINY_RUN}": "step 1 reached",
            "uvx --from . titanlite models": "llama3",
        }.items():
            done = shell(f"timeout 240 {command}", copy, uv, **online)
            if done.returncode == 124 or "Failed to fetch" in done.stderr:
                pytest.skip("uv reaches no package index, or one that takes more than 4 minutes")
            assert done.returncode == 0 and found in done.stdout, done
    finally:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shutil.rmtree(copy / ".venv", ignore_errors=True)


@pytest.mark.nightly
def test_into_an_environment_of_uv_without_titanlite_it_is_installed_and_nothing_is_removed(
    checkout, uv
):
    """Whatever its Python's version, and whichever interpreter comes first on the path."""
    names = (f"python3.{minor}" for minor in (10, 12, 13, 11))
    others = [found for name in names if (found := shutil.which(name)) and works(found)]
    succeeds(f"uv venv -q --python {[*others, sys.executable][0]} .venv", checkout, uv)
    kept, project = checkout / ".venv/kept", checkout / "pyproject.toml"
    kept.touch()
    project.write_text(  # without a torch: another Python has none to lend
        project.read_text().replace('["torch>=2.11,<2.16"]', '[]\n# "torch>=2.11,<2.16"')
    )
    for _ in range(2):
        done = shell(f"{sys.executable} {SCRIPT}", checkout, uv)
        assert done.returncode == 0, done
        assert done.stdout.strip() == str(checkout / ".venv/bin/python")
        # Its needs are still not there the second time.
        assert INSTALLS in done.stderr and kept.exists()


def works(python: str) -> bool:
    return not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode


@pytest.mark.parametrize("kind", sample(["conda", "venv"], nightly=["venv"]))
def test_an_environment_elsewhere_that_can_run_titanlite_is_used_and_none_is_made(
    copy, tmp_path, kind
):
    """With plain pip titanlite is installed in place; the interpreter on the path is taken,
    activated or not. The script finds itself by links, from any folder, and by sh.
    """
    elsewhere, folder = tmp_path / kind, tmp_path / "other folder"
    (conda_like if kind == "conda" else make_venv)(elsewhere)
    lend(elsewhere, copy)
    folder.mkdir()
    (tmp_path / "link.sh").symlink_to(copy / "run_train.sh")
    (folder / "train.sh").symlink_to("../link.sh")
    script = shlex.quote(str(copy / "run_train.sh"))
    commands = ["./train.sh", "sh train.sh", f"bash {script}"] if kind == "venv" else [script]
    for command in commands:
        out = succeeds(f"{command} --help optimizer", folder, elsewhere / "bin")
        says(out, "--optimizer.lr = ")
    assert not (copy / ".venv").exists()


@pytest.mark.nightly
def test_an_environment_elsewhere_without_titanlite_is_left_as_it_is_and_lends_its_torch(
    checkout, tmp_path
):
    elsewhere = conda_like(tmp_path / "conda")
    torch = elsewhere / f"lib/{STDLIB.name}/site-packages/torch-2.14.0.dist-info/METADATA"
    torch.parent.mkdir()
    torch.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.0\n")
    before, expected = files_of(elsewhere), f"{checkout}/.venv/bin/python\n"
    command, first = f"python3 {SCRIPT}", elsewhere / "bin"
    done = shell(command, checkout, first, VIRTUAL_ENV=str(elsewhere))
    assert (done.returncode, done.stdout) == (0, expected), done
    assert files_of(elsewhere) == before
    assert succeeds(command, checkout, first) == expected
    elsewhere.rename(tmp_path / "gone")
    moved = shell(f"{sys.executable} {SCRIPT}", checkout)
    assert INSTALLS in moved.stderr, "what was lent is gone, so it is installed"


@pytest.mark.nightly
@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_a_hint_names_an_installer_that_is_there(request, copy, checkout, tmp_path, tool):
    """The package to install is the small project of `checkout`, so that no index is asked."""
    elsewhere = make_venv(tmp_path / "an env", *["--without-pip"] * (tool == "uv"))
    (place,) = elsewhere.glob("lib/python3*/site-packages")
    (place / "lent.pth").write_text(f"{copy}\n")
    code = "from titanlite.errors import install_command; print(install_command('wandb'))"
    first = [elsewhere / "bin", *[request.getfixturevalue("uv")] * (tool == "uv")]
    hint = succeeds(f'python -c "{code}"', tmp_path, *first).strip()
    assert hint.startswith("uv pip ") == (tool == "uv")
    command = hint.removesuffix("wandb")
    assert command != hint
    done = shell(f"{command}--no-deps --no-build-isolation .", checkout, *first)
    assert done.returncode == 0 and list(place.glob("titanlite-0.0.dist-info")), done
