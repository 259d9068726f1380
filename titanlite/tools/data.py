"""`titanlite data`: tokenize text into shards, and inspect what a folder of shards holds."""

import shlex
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from titanlite.config.options import Options, declare_commands, positive_int
from titanlite.config.rules.data import BYTE_VOCABULARY
from titanlite.data.documents import SUFFIXES, text_files
from titanlite.data.prepare import prepare
from titanlite.data.shards import ShardSource, read_manifest
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, printable
from titanlite.errors import UserError, format_table, print_notice
from titanlite.observe.progress import progress_bar
from titanlite.runtime.cluster import cores
from titanlite.tools.exclusive import writing


def add_arguments(parser: ArgumentParser) -> None:
    """Declare `prepare` and `show`."""
    making: Options = {
        "SRC …": f"{', '.join(SUFFIXES)} files, or folders of them",
        "--out FOLDER": ("where the shards are written", Path, None, True),
        "--tokenizer FOLDER": ("has tokenizer.json (default: bytes)", str, ""),
        "--workers N": ("default: all cores", positive_int, cores()),
    }
    about = "tokenize text into shards; a stopped run continues where it stopped"
    example = "prepare books wiki.jsonl --tokenizer assets/hf/gpt2 --out shards"
    shown = "print the counts, the share of each source, and a few decoded windows"
    folder: Options = {"FOLDER": ("made by `titanlite data prepare`", Path)}
    commands = {
        "prepare": (_prepare, about, example, making),
        "show": (_show, shown, "show shards", folder),
    }
    declare_commands(parser, commands, title="commands")


def run(arguments: Namespace, overrides: list[str]) -> int:
    """Run `prepare` or `show`."""
    return arguments.run(arguments)


def _prepare(arguments: Namespace) -> int:
    arguments.resumable = True
    load_tokenizer(arguments.tokenizer, "--tokenizer")  # before the bar
    documents = {source: text_files(source, source) for source in arguments.src}
    for notice in filter(None, (found.notice for found in documents.values())):
        print_notice(notice)
    with writing(arguments.out), progress_bar("bytes") as report:
        manifest = prepare(
            documents, arguments.tokenizer, arguments.out, arguments.workers, report, print_notice
        )
    print(f"{counts_line(manifest)}: {arguments.out}")
    size = manifest["vocab_size"]
    options = ["--training.dataset", "tokens", "--training.dataset_path", str(arguments.out)]
    options += ["--model.overrides.vocab_size", str(size)] * (size != BYTE_VOCABULARY)
    print(f"to train on them: {shlex.join(options)}")
    return 0


def counts_line(manifest: dict[str, Any]) -> str:
    """Return the numbers of tokens, documents and shards of a manifest."""
    numbers = {name: manifest[name] for name in ("tokens", "documents")} | {
        "shards": len(manifest["shards"])
    }
    return ", ".join(
        f"{number:,} {name.removesuffix('s' * (number == 1))}" for name, number in numbers.items()
    )


def _show(arguments: Namespace) -> int:
    folder = arguments.folder
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(
            f"{folder} was not made by `titanlite data prepare`: it has no manifest.json"
        )
    tokenizer: Tokenizer = (
        load_tokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else ByteTokenizer()
    )
    total, vocab_size = manifest["tokens"], manifest["vocab_size"]
    source = ShardSource("data show", folder, vocab_size, manifest["end"])
    print(counts_line(manifest))
    print(
        f"vocabulary {vocab_size:,}, tokenizer {manifest['tokenizer']}, "
        f"fingerprint {source.fingerprint}"
    )
    rows = [
        (
            f"{part['tokens'] / total:.1%}",
            f"{part['tokens']:,} tokens",
            f"{part['documents']:,} documents",
            name,
        )
        for name, part in manifest["sources"].items()
    ]
    print(format_table(rows, align=">>>", indent=2))
    for tenth in (1, 5, 9):
        start = source.tokens * tenth // 10
        text = tokenizer.decode(source.read(start, min(64, source.tokens - start)).tolist())
        print(f"\nfrom token {start:,}:\n    " + "\n    ".join(printable(text).splitlines()))
    return 0
