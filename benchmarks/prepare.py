"""Compare the speed of `titanlite data prepare` with the tokenizer in a plain loop, on the same
text.

    python benchmarks/prepare.py [--rounds 5]

The text is the standard library, the tokenizer a BPE of 8,000 trained on it. Rounds alternate
between the plain loop (one process, one thread, ids discarded), prepare with one worker, and
prepare with all cores; medians are printed."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from titanlite.data import prepare as module  # noqa: E402
from titanlite.data.documents import standard_library  # noqa: E402
from titanlite.data.tokenizer import load_tokenizer  # noqa: E402
from titanlite.runtime.cluster import cores  # noqa: E402
from titanlite.runtime.store import LocalPath  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    module.UNIT_BYTES = 1 << 20  # the text is small, and every core needs a part of it
    documents = standard_library(held_out=False)
    texts = [
        (documents.root / n).read_bytes().decode("utf-8", errors="replace") for n in documents.names
    ]
    size = sum(documents.sizes)
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder)
        _train_tokenizer(assets, texts)
        tokenizer = load_tokenizer(str(assets))

        def plain_loop() -> None:
            for text in texts:
                tokenizer.encode(text)

        def run_prepare(workers: int) -> None:
            shutil.rmtree(assets / "out", ignore_errors=True)
            module.prepare({"stdlib": documents}, str(assets), LocalPath(assets, "out"), workers)

        cases: dict[str, Callable[[], None]] = {
            "tokenizer in a plain loop": plain_loop,
            "prepare, 1 worker": lambda: run_prepare(1),
            f"prepare, {cores()} workers": lambda: run_prepare(cores()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, run in cases.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    reference = statistics.median(seconds["tokenizer in a plain loop"])
    print(f"{size / 1e6:.1f} MB of text in {len(texts)} documents, {rounds} rounds, medians")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"  {name:<26} {size / median / 1e6:6.2f} MB/s   {reference / median:.2f} "
            "of the plain loop"
        )


def _train_tokenizer(assets: Path, texts: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|end_of_text|>"], show_progress=False
    )
    tokenizer.train_from_iterator(texts[::10], trainer)
    tokenizer.save(str(assets / "tokenizer.json"))


if __name__ == "__main__":
    main()
