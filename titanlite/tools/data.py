"""`titanlite data`: tokenize text into shards, and inspect what a folder of shards holds."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import progress
from rich.console import Console

from titanlite.config.rules.data import BYTE_VOCABULARY
from titanlite.data.documents import SUFFIXES, text_files
from titanlite.data.prepare import Progress, prepare
from titanlite.data.shards import ShardSource, read_manifest
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, printable
from titanlite.errors import UserError, format_table
from titanlite.runtime.cluster import cores
from titanlite.tools.config import positive_int
from titanlite.tools.exclusive import writing


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `prepare` and `show`."""
    commands = parser.add_subparsers(title="commands", metavar="prepare|show", required=True)
    about = "tokenize text into shards; a stopped run continues where it stopped"
    making = commands.add_parser("prepare", help=about, description=about)
    making.epilog = "example: titanlite data prepare books wiki.jsonl --tokenizer assets/hf/gpt2 --out shards"
    making.add_argument("sources", nargs="+", metavar="SRC", help=f"{', '.join(SUFFIXES)} files, or folders of them")
    making.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the shards are written")
    making.add_argument("--tokenizer", default="", metavar="FOLDER", help="has tokenizer.json (default: bytes)")
    making.add_argument("--workers", type=positive_int, default=cores(), metavar="N", help="default: all cores")
    making.set_defaults(run=_prepare, resumable=True)
    about = "print the counts, the share of each source, and a few decoded windows"
    showing = commands.add_parser("show", help=about, description=about, epilog="example: titanlite data show shards")
    showing.add_argument("folder", type=Path, metavar="FOLDER", help="made by `titanlite data prepare`")
    showing.set_defaults(run=_show)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run `prepare` or `show`."""
    return arguments.run(arguments)


def _prepare(arguments: Namespace) -> int:
    load_tokenizer(arguments.tokenizer, "--tokenizer")  # before the bar
    documents = {source: text_files(source, source) for source in arguments.sources}
    for notice in filter(None, (found.notice for found in documents.values())):
        _print_notice(notice)
    with writing(arguments.out), _progress_bar() as report:
        manifest = prepare(documents, arguments.tokenizer, arguments.out, arguments.workers, report, _print_notice)
    print(f"{counts_line(manifest)}: {arguments.out}")
    size = manifest["vocab_size"]
    options = ["--training.dataset", "tokens", "--training.dataset_path", str(arguments.out)]
    options += ["--model.overrides.vocab_size", str(size)] * (size != BYTE_VOCABULARY)
    print(f"to train on them: {shlex.join(options)}")
    return 0


def counts_line(manifest: dict[str, Any]) -> str:
    """Return the numbers of tokens, documents and shards of a manifest."""
    numbers = {name: manifest[name] for name in ("tokens", "documents")} | {"shards": len(manifest["shards"])}
    return ", ".join(f"{number:,} {name.removesuffix('s' * (number == 1))}" for name, number in numbers.items())


def _print_notice(text: str) -> None:
    print(f"titanlite: {text}", file=sys.stderr)


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """Yield a callback that draws a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(
        *columns, progress.TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(arguments: Namespace) -> int:
    folder = arguments.folder
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} was not made by `titanlite data prepare`: it has no manifest.json")
    tokenizer: Tokenizer = load_tokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else ByteTokenizer()
    total, vocab_size = manifest["tokens"], manifest["vocab_size"]
    source = ShardSource("data show", folder, vocab_size, manifest["end"])
    print(counts_line(manifest))
    print(f"vocabulary {vocab_size:,}, tokenizer {manifest['tokenizer']}, fingerprint {source.fingerprint}")
    rows = [
        (f"{part['tokens'] / total:.1%}", f"{part['tokens']:,} tokens", f"{part['documents']:,} documents", name)
        for name, part in manifest["sources"].items()
    ]
    print(format_table(rows, align=">>>", indent=2))
    for tenth in (1, 5, 9):
        start = source.tokens * tenth // 10
        text = tokenizer.decode(source.read(start, min(64, source.tokens - start)).tolist())
        print(f"\nfrom token {start:,}:\n    " + "\n    ".join(printable(text).splitlines()))
    return 0
