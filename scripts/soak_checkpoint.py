"""Kill training 200 times while it saves; each next start must resume the committed steps by
itself.

    python scripts/soak_checkpoint.py --rounds 200 [--seed 0]
    python scripts/soak_checkpoint.py --round 17 --seed 3     only the kill of one round
    python scripts/soak_checkpoint.py --rounds 60 --root s3://bucket/soak     in a bucket

Two ranks on the CPU save every other step. In three rounds of four a rank is killed (SIGKILL) at a
failpoint of a save, otherwise at a random moment; all rounds use one folder, which is watched all
the time. Then everything is compared bit for bit with a run that was never killed; a save of 60 s
meets a training timeout of 20 s; 50 saves on four ranks must not grow the memory; and state saved
on each of eight layouts loads on all of them. With --root only the rounds are run, in an empty
place of the environment's store (for s3:// moto's server on loopback, unless AWS_ENDPOINT_URL is
set). The last line is the result, and the exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.checkpoint.layouts import LAYOUTS, save_and_load_everywhere  # noqa: E402
from tests.failpoints import FAILPOINTS  # noqa: E402
from tests.faults.rounds import (  # noqa: E402
    RANKS,
    Bucket,
    Soak,
    Watcher,
    memory_of_saves,
    planned,
    slow_save,
)
from tests.stores.server import moto, using  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402
from titanlite.verify.pool import Pool  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--round", type=int, help="only this round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", default="", help="URL of an empty place for the checkpoints")
    arguments = parser.parse_args()
    own_server = arguments.root.startswith("s3:") and "AWS_ENDPOINT_URL" not in os.environ
    with ExitStack() as stack:
        port = stack.enter_context(moto()) if own_server else 0
        if port:
            stack.enter_context(using(port))
        return _soak(arguments, Bucket(arguments.root, port))


def _soak(arguments: argparse.Namespace, bucket: Bucket) -> int:
    one_round = arguments.round is not None
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        numbers = [arguments.round] if one_round else range(arguments.rounds)
        failures, soak = _rounds(LocalPath(folder), list(numbers), arguments.seed, bucket)
        if not one_round and not bucket.url:
            failures += (
                _slow_disk(LocalPath(folder))
                + _memory(LocalPath(folder))
                + _layouts(LocalPath(folder))
            )
    for failure in failures:
        print(failure)
    fewest = min(soak.hits[point] for point in FAILPOINTS)
    hits = f"every failpoint hit at least {5 if fewest >= 5 else fewest} times"
    print(
        f"{len(numbers)} rounds, {soak.inside} kills inside a save, {hits}, "
        f"{len(failures)} failures"
    )
    least = 5 if len(numbers) >= 100 else 1
    enough = one_round or (fewest >= least and soak.inside >= 0.6 * len(numbers))
    return int(bool(failures) or not enough)


def _rounds(
    folder: LocalPath, numbers: list[int], seed: int, bucket: Bucket
) -> tuple[list[str], Soak]:
    soak = Soak(folder / "run", bucket=bucket)
    watcher = Watcher(soak.root)
    (folder / "run").mkdir()
    watcher.start()
    failures, began = [], time.monotonic()
    for number in numbers:
        plan = planned(seed, number)
        if bucket.url and plan.point == "half a manifest":  # an object is never half written
            continue
        wrong = soak.round(plan)
        if wrong:
            failures.append(f"--seed {seed} --round {number}, {plan}: {wrong}")
            print(failures[-1], flush=True)
        if (number + 1) % 10 == 0:
            print(
                f"{number + 1} rounds, {soak.inside} kills inside, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
    failures += [f"after the rounds of --seed {seed}: {wrong}" for wrong in soak.finish()]
    watcher.end()
    print(
        f"the watcher looked {watcher.looks} times, "
        f"{watcher.missed} times without a verified checkpoint"
    )
    if watcher.missed:
        failures.append("the watcher saw no verified checkpoint")
    return failures, soak


def _slow_disk(folder: LocalPath) -> list[str]:
    pool = Pool(RANKS, preload=["titanlite.train.trainer"])
    results = pool.run(slow_save, 60.0, 20.0, str(folder / "slow"), timeout=300)
    pool.close()
    print(
        f"a save of 60 s under a training timeout of 20 s: step {results[0][0]}, "
        f"{results[0][1]:.0f} s",
        flush=True,
    )
    return (
        []
        if all(step == 4 and took >= 60 for step, took in results)
        else [f"the slow save: {results}"]
    )


def _memory(folder: LocalPath) -> list[str]:
    pool = Pool(4, preload=["titanlite.train.trainer"])
    ranks = pool.run(memory_of_saves, 50, str(folder / "memory"), timeout=900)
    pool.close()
    # Single readings differ by 3 %.
    growth = [median(found[-15:]) / median(found[10:25]) - 1 for found in ranks]
    print(
        "50 saves on 4 ranks: memory of the last 15 against the 15 after the tenth "
        f"{', '.join(f'{100 * g:+.1f} %' for g in growth)}",
        flush=True,
    )
    return (
        []
        if max(growth) <= 0.02 and all(len(found) == 50 for found in ranks)
        else [f"memory grew: {growth}"]
    )


def _layouts(folder: LocalPath) -> list[str]:
    pool = Pool(8, preload=["titanlite.train.trainer"])
    wrong = save_and_load_everywhere(pool, folder / "layouts", LAYOUTS)
    pool.close()
    print(
        f"saved and loaded on {', '.join(LAYOUTS)}: {len(LAYOUTS) ** 2} pairs, {len(wrong)} differ",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
