"""The servers of these tests, each started once a session, when it is first asked for; runs whose
checkpoints are there, and what they leave.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.saved import SAVING, run_until
from tests.lanes import sample
from tests.stores import azure, gs, server
from tests.stores.server import BUCKET, FaultProxy, credentials, in_environment
from tests.tools.conftest import tool  # noqa: F401
from titanlite.checkpoint.manifest import MANIFEST, committed, faults, read_manifest, step_folder
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place

_FOLDERS = count()
TO = "--training.steps={}".format
CLOUDS = sample(["s3", "gs", "az"], "s3", "gs")
Train = Callable[..., tuple[list[Any], int, str]]


@dataclass
class Store:
    """An empty place in a store, the environment that leads there, and a proxy before it."""

    name: str
    url: str
    environment: dict[str, str]
    proxy: Any = None


def run_at(
    environment: dict[str, str],
    argv: list[str],
    folder: str,
    stop: int | None,
    patience: float,
) -> dict[str, Any]:
    """Train on a rank, with the stores of an environment."""
    bucket._PATIENCE_SECONDS = patience
    with in_environment(environment):
        return run_until(argv, folder, stop)


def whole_steps(url: str) -> list[int]:
    """Return the steps of a place, every byte read."""
    root, whole = place(url), []
    for step in committed(root):
        folder = step_folder(root, step)
        if MANIFEST in folder.entries():
            manifest = read_manifest(folder)
            assert not faults(folder, manifest, manifest.files)
            whole.append(step)
    return whole


@pytest.fixture(scope="session")
def port_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], int]]:
    """Starts a server unless it has been started; returns its port."""
    server.needs_extra()
    starts: dict[str, Any] = {"s3": server.moto, "gs": gs.google, "az": azure.azurite}
    for start in (server.seaweedfs, server.rclone):
        starts[start.__name__] = lambda start=start: start(tmp_path_factory.mktemp(start.__name__))
    ports = dict[str, int]()
    with ExitStack() as running:

        def port_of(name: str) -> int:
            if name not in ports:
                ports[name] = running.enter_context(starts[name]())
            return ports[name]

        yield port_of


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty place in the store that is named, s3 unless one is, which this process can reach."""
    name = getattr(request, "param", "s3")
    proxy = FaultProxy(request.getfixturevalue("port_of")(name))
    scheme, here = "s3", credentials(proxy.port)
    if name == "gs":
        scheme, here = name, gs.account(proxy.port, tmp_path)
    if name == "az":
        scheme, here = name, azure.account(proxy.port)
    with in_environment(here):
        yield Store(name, f"{scheme}://{BUCKET}/{next(_FOLDERS)}", here, proxy)


@pytest.fixture
def proxy(store: Store) -> FaultProxy:
    return store.proxy


@pytest.fixture
def url(store: Store) -> str:
    return store.url


@pytest.fixture
def train(pool: Any, store: Store, tmp_path: Path) -> Train:
    """Trains to a step in the folder tmp_path / "run", with checkpoints at `url`; returns the
    states, the step that it began at, and the log.
    """
    here = store.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    patience = 1 if store.name == "s3" else 60

    def train(steps: int, *more: str, world: int = 2, stop: int | None = None) -> Any:
        argv = [*SAVING, f"--checkpoint.folder={store.url}", TO(steps), *more]
        folder = str(tmp_path / "run")
        ranks = pool.run(run_at, here, argv, folder, stop, patience, world=world)
        return [rank["state"] for rank in ranks], ranks[0]["begun"], "\n".join(ranks[0]["log"])

    return train


@pytest.fixture(scope="session")
def straight(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An undisturbed run of 6 steps, with a local folder."""
    folder = tmp_path_factory.mktemp("straight")
    ranks = pool.run(run_until, [*SAVING, TO(6)], str(folder), world=2)
    return folder, [rank["state"] for rank in ranks]


@pytest.fixture(scope="session")
def saved(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps, with a local folder."""
    folder = tmp_path_factory.mktemp("saved")
    pool.run(run_until, [*SAVING, TO(2)], str(folder), world=2)
    return folder
