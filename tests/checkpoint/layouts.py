"""State saved on one layout and loaded on another: all of it, bit for bit."""

from collections.abc import Sequence

from tests.checkpoint.saved import digests, everyone, joined, run_until
from tests.jobs import TINY, trainer
from titanlite.checkpoint.load import at_path, restore
from titanlite.runtime.store import LocalPath
from titanlite.verify.pool import Pool

_TP2, _HSDP = (
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.data_parallel_replicate_degree=2",
)
LAYOUTS = {
    "one": (1, []),
    "dp2": (2, []),
    "dp3": (3, []),
    "dp4": (4, []),
    "replicas": (2, [_HSDP]),
    "tp2": (2, [_TP2]),
    "dp2tp2": (4, [_TP2]),
    "hsdp2x2": (4, [_HSDP]),
    "hsdp2x2xtp2": (8, [_HSDP, _TP2]),
}
WIDE = [*TINY, "--model.overrides.n_kv_heads=2", "--model.overrides.n_layers=1"]


def load_all(argv: list[str], folder: str, sources: dict[str, str]) -> dict[str, dict]:
    """Return the digests of the state after loading each checkpoint."""
    run = trainer(argv, folder)
    found = {}
    for name, path in sources.items():
        restore(
            at_path(LocalPath(path), True, everyone(), weights_only=False), run.state, everyone()
        )
        found[name] = digests(run)
    return found


def save_and_load_everywhere(
    pool: Pool,
    folder: LocalPath,
    layouts: dict[str, tuple[int, list[str]]],
    model: Sequence[str] = WIDE,
) -> list[str]:
    """Save on each layout and load on all; return the pairs whose state differs."""
    saved, sources = {}, {}
    for name, (world, layout) in layouts.items():
        argv = [*model, *layout, "--checkpoint.enable", "--training.steps=2"]
        ranks = pool.run(run_until, argv, str(folder / name), world=world)
        saved[name] = joined([rank["state"] for rank in ranks])
        sources[name] = str(folder / name / "checkpoint")
    wrong = set()
    names = list(layouts)
    for place, (target, (world, layout)) in enumerate(layouts.items()):
        others = {names[(place + step) % len(names)] for step in (1, 2, 4)}
        some = {name: sources[name] for name in others}
        ranks = pool.run(load_all, [*model, *layout], str(folder / "to"), some, world=world)
        found = {name: joined([rank[name] for rank in ranks]) for name in some}
        wrong |= {
            f"saved on {name}, loaded on {target}: differs"
            for name in some
            if found[name] != saved[name]
        }
    return sorted(wrong)
