"""`titanlite data`: tokenize text into shards, or list the token files of another program, and show
any data set as the model sees it.
"""

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from titanlite.config.job import job_from
from titanlite.config.load import parse_command_line
from titanlite.config.options import Options, declare_commands, positive_int
from titanlite.config.rules.data import BYTE_VOCABULARY
from titanlite.config.urls import is_url
from titanlite.data.documents import SUFFIXES, Documents, text_files
from titanlite.data.foreign import FORMATS, list_tokens, token_files
from titanlite.data.prepare import prepare
from titanlite.data.remote import folder_of
from titanlite.data.shards import read_shard_manifest
from titanlite.data.tokenizer import load_tokenizer, printable, tokenizer_of
from titanlite.errors import UserError, format_table, print_notice
from titanlite.observe.progress import progress_bar
from titanlite.runtime import lock
from titanlite.runtime.bucket import place
from titanlite.runtime.cluster import cores


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `prepare` and `show`."""
    making: Options = {
        "SRC …": f"{', '.join(SUFFIXES)} files (with --from: .bin, .npy), or folders of them",
        "--out FOLDER": ("the folder or URL to write the shards to", place, None, True),
        "--text-key NAME": ("the field or column with the text (default: text)", str, "text"),
        "--tokenizer FOLDER": ("a folder with tokenizer.json (default: bytes)", str, ""),
        f"--from {'|'.join(FORMATS)}": (
            "SRC holds token ids of another program, or bare ids of a type. They stay in place, "
            "and --out gets a list of them and of the ends of documents, which other files give, "
            "or else the end tokens of --tokenizer",
            str,
        ),
        "--workers N": ("default: all cores", positive_int, cores()),
    }
    about = "tokenize text into shards; a stopped run continues where it stopped"
    example = "prepare books wiki.jsonl --tokenizer assets/hf/gpt2 --out shards"
    shown = "print windows of a data set as the model sees them, with trained tokens in color"
    windows: Options = {
        "FILE": ("a data set's file, folder or URL, or a config (.toml) that names one", str),
        "--n N": ("windows (default: 2)", positive_int, 2),
        "--first N": ("number of the first window in a run's order (default: 0)", int, 0),
        "--ids": "print the ids of the tokens too",
    }
    commands = {
        "prepare": (_prepare, about, example, making),
        "show": (_show, shown, "show chats.jsonl --model.hf_assets_path folder", windows),
    }
    parsers = declare_commands(parser, commands, title="commands")
    parsers["show"].set_defaults(takes_overrides=True)


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run `prepare` or `show`."""
    arguments.overrides = overrides
    return arguments.run(arguments)


def _prepare(arguments: Namespace) -> int:
    arguments.resumable = True
    tokenizer = load_tokenizer(arguments.tokenizer, "--tokenizer")  # before the bar
    kind = getattr(arguments, "from")
    documents = dict[str, Documents]()
    for source in arguments.src:
        if kind:
            documents[source] = token_files("SRC", source, kind)
        else:
            documents[source] = replace(text_files("SRC", source), text_key=arguments.text_key)
    _require_apart(documents)
    for notice in filter(None, (found.notice for found in documents.values())):
        print_notice(notice)
    if kind and is_url(str(arguments.out)):
        raise UserError("must be a folder here: the ids stay in theirs", "--out")
    lock_file = arguments.out.draft().with_suffix(".lock")
    try:
        lock.take(lock_file, str(arguments.out))
    except OSError as error:
        raise UserError(f"{arguments.out} cannot be written to: {error}") from None
    options = arguments.tokenizer, arguments.out, arguments.workers
    try:
        if kind:
            end = tokenizer.end if arguments.tokenizer else -1
            manifest = list_tokens(documents, kind, end, arguments.out.local())
        else:
            with progress_bar("bytes") as report:
                manifest = prepare(documents, *options, report, print_notice)
    finally:
        lock_file.unlink(missing_ok=True)
    print(f"{counts_line(manifest)}: {arguments.out}")
    size = manifest["vocab_size"]
    options = ["--training.dataset", "tokens", "--training.dataset_path", str(arguments.out)]
    if size not in (0, BYTE_VOCABULARY):
        options += ["--model.overrides.vocab_size", str(size)]
    print(f"to train on them: {shlex.join(options)}")
    return 0


def _require_apart(sources: dict[str, Documents]) -> None:
    """Raise a UserError if two sources share a file, whose text would count twice."""
    seen: dict[str, str] = {}
    for source, documents in sources.items():
        for name in documents.names:
            file = str((documents.root / name).resolve())
            if (other := seen.setdefault(file, source)) != source:
                raise UserError(f"SRC {other} and {source} both have {file}; drop one of them")


def counts_line(manifest: dict[str, Any]) -> str:
    """Return the numbers of tokens, documents and shards in a manifest."""
    numbers = {
        "token": manifest["tokens"],
        "document": manifest["documents"],
        "shard": len(manifest["shards"]),
    }
    return ", ".join(
        f"{number:,} {name if number == 1 else name + 's'}" for name, number in numbers.items()
    )


def _show(arguments: Namespace) -> int:
    from titanlite.data.loader import build_loader
    from titanlite.data.shuffle import RankSlice
    from titanlite.data.windows import training_data

    path = arguments.file
    is_config = path.endswith(".toml")
    named = ["--config", path] if is_config else _options(path)
    line = parse_command_line([*named, *arguments.overrides], {})
    job = job_from(line, world=None, training=True)
    config, size = job.config, job.shape.vocab_size
    tokenizer = tokenizer_of(config)
    if not is_config:
        size = tokenizer.vocab_size if tokenizer else _LARGEST
    job = replace(job, shape=replace(job.shape, vocab_size=size))
    manifest = read_shard_manifest(folder_of("training", config.training.dataset_path))
    if manifest:
        _describe(manifest)
    data = training_data(job, tokenizer, config.debug.seed or 0)
    everything = RankSlice(0, 1, arguments.n)
    (batch,) = build_loader(data, everything, arguments.first, 1, config.training.dataloader)
    print(f"{_mark('like this')}: trained, as targets; a document's first token is input only")
    for number, window in enumerate(batch, arguments.first):
        print(f"\nwindow {number:,}: {(window[1] >= 0).sum():,} of {len(window[0]):,} trained")
        for ids, trained in _documents(window):
            print("-" * 20)
            if tokenizer:
                print(_marked(ids, trained, lambda run: printable(tokenizer.decode(run))))
            if arguments.ids or not tokenizer:
                print(_marked(ids, trained, lambda run: f" {' '.join(map(str, run))} "))
    return 0


_LARGEST = 1 << 32
"""Ids of shards that come without a tokenizer."""


def _options(place: str) -> list[str]:
    """Return the config options for a data set's file, folder or URL."""
    kind, masked = "text", ["--training.document_mask"]
    path = Path(place)
    files = list(path.iterdir()) if path.is_dir() else [path]
    if is_url(place):
        kind = "tokens"
    elif any(file.suffix in (".bin", ".npy") for file in files):
        manifest = read_shard_manifest(path)
        kind = "tokens"
        if not manifest or not manifest["documents"]:
            masked = []
    elif path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as file:
            kind = "chat" if b'"messages"' in file.readline() else kind
    return [f"--training.dataset={kind}", f"--training.dataset_path={place}", *masked]


def _describe(manifest: dict[str, Any]) -> None:
    """Print the counts of prepared shards, and the share of each source."""
    print(counts_line(manifest))
    vocabulary = ""
    if manifest["tokenizer"]:
        vocabulary = f"vocabulary {manifest['vocab_size']:,}, tokenizer {manifest['tokenizer']}, "
    print(f"{vocabulary}fingerprint {manifest['fingerprint']}")
    rows = [
        (
            f"{part['tokens'] / manifest['tokens']:.1%}",
            f"{part['tokens']:,} tokens",
            f"{part['documents']:,} documents",
            name,
        )
        for name, part in manifest["sources"].items()
    ]
    print(format_table(rows, align=">>>", indent=2))


def _documents(window: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the ids of each document in a window, and which of them are trained.

    The last label, which is not an input of this window, is included.
    """
    tokens, labels, *masks = window
    number = masks[0] if masks else np.zeros_like(tokens)
    changes = (number[1:] != number[:-1]) | ((labels >= 0)[:-1] & (labels[:-1] != tokens[1:]))
    found = []
    for part in np.split(np.arange(len(tokens)), np.flatnonzero(changes) + 1):
        ids = np.append(tokens[part], labels[part[-1]])
        trained = np.append(False, labels[part] >= 0)
        if number[part[0]] >= 0:  # no padding
            found.append((ids[ids >= 0], trained[ids >= 0]))
    return found


def _marked(ids: np.ndarray, trained: np.ndarray, write: Callable[[list[int]], str]) -> str:
    """Return the tokens as text, by `write`, with trained ones in color or in brackets."""
    pairs = zip(trained.tolist(), ids.tolist(), strict=True)
    runs = [(shown, write([i for _, i in run])) for shown, run in groupby(pairs, lambda p: p[0])]
    return "".join(_mark(text) if shown else text for shown, text in runs)


def _mark(text: str) -> str:
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        return f"\033[32m{text}\033[0m"
    return f"⟦{text}⟧"
