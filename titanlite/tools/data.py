"""`titanlite data prepare` and `titanlite data show`."""

from __future__ import annotations

import sys
from pathlib import Path

from titanlite.data.documents import text_files
from titanlite.data.prepare import ConsoleProgress, prepare
from titanlite.data.shards import ShardSource, read_manifest
from titanlite.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, printable
from titanlite.errors import UserError
from titanlite.runtime.cluster import cores
from titanlite.tools.arguments import run_resumable, split_options

USAGE = """  titanlite data prepare SRC… --out FOLDER [--tokenizer FOLDER] [--workers N]
      Tokenize text (.txt, .jsonl, .parquet files, or folders of them) into shards. Without --tokenizer bytes are
      tokens. A run that was killed goes on where it stopped.
  titanlite data show FOLDER
      Counts, the share of each source, and a few decoded windows.
"""


def data(words: list[str]) -> int:
    """Run a verb; the exit code."""
    asked = not words or bool({"--help", "-h"} & set(words))
    if not asked and words[0] == "prepare":
        return run_resumable(lambda: _prepare(words[1:]))
    if not asked and words[0] == "show" and len(words) == 2:
        return run_resumable(lambda: _show(Path(words[1])))
    print(USAGE, end="", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


def _prepare(words: list[str]) -> int:
    defaults = {"--out": "", "--tokenizer": "", "--workers": str(cores())}
    sources, options = split_options("data prepare", words, defaults)
    if not sources or not options["--out"]:
        raise UserError("data prepare needs at least one SRC, and --out FOLDER")
    if not options["--workers"].isdigit() or int(options["--workers"]) < 1:
        raise UserError(f"--workers {options['--workers']} must be a whole number >= 1")
    documents = {source: text_files(source, source) for source in sources}
    workers = int(options["--workers"])
    out = Path(options["--out"])
    manifest = prepare(documents, options["--tokenizer"], out, workers, ConsoleProgress(), _say)
    counts = f"{manifest['tokens']:,} tokens of {manifest['documents']:,} documents"
    print(f"{counts} in {len(manifest['shards'])} shards: {out}")
    print(f'to train on them: --training.dataset tokens --training.dataset_path "{out}"')
    return 0


def _say(text: str) -> None:
    print(f"titanlite: {text}", file=sys.stderr)


def _show(folder: Path) -> int:
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"{folder} was not made by `titanlite data prepare`: it has no manifest.json")
    tokenizer: Tokenizer = load_tokenizer(str(folder)) if (folder / "tokenizer.json").is_file() else ByteTokenizer()
    source = ShardSource("data show", folder, manifest["vocab_size"], manifest["end"])
    print(f"{manifest['tokens']:,} tokens, {manifest['documents']:,} documents, {len(manifest['shards'])} shards")
    print(
        f"vocabulary {manifest['vocab_size']:,}, tokenizer {manifest['tokenizer']}, fingerprint {source.fingerprint}"
    )
    for name, counts in manifest["sources"].items():
        share = counts["tokens"] / manifest["tokens"]
        print(f"  {share:6.1%}  {counts['tokens']:,} tokens, {counts['documents']:,} documents  {name}")
    for tenth in (1, 5, 9):
        start = source.tokens * tenth // 10
        text = tokenizer.decode(source.read(start, min(64, source.tokens - start)).tolist())
        print(f"\nfrom token {start:,}:\n    " + "\n    ".join(printable(text).splitlines()))
    return 0
