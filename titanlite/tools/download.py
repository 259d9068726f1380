"""`titanlite download`: a tokenizer, or weights, from the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

from titanlite.errors import UserError, first_line, nearest
from titanlite.tools.arguments import run_resumable, split_options

USAGE = """  titanlite download REPO [--only tokenizer|weights] [--to FOLDER]
      Fetch a model's tokenizer, weights and config from the Hugging Face hub, by default into ./assets/hf/NAME. Run
      again it goes on where it stopped. HF_TOKEN opens gated repositories.
"""

FILES = {
    "tokenizer": ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"],
    "weights": ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"],
}


def download(words: list[str]) -> int:
    """Run the verb; the exit code."""
    if not words or {"--help", "-h"} & set(words):
        print(USAGE, end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    return run_resumable(lambda: _fetch(words))


def _fetch(words: list[str]) -> int:
    folder = _download(*_asked(words))
    print(f'to use it: --model.hf_assets_path "{folder}"')
    return 0


def _asked(words: list[str]) -> tuple[str, list[str], Path]:
    repos, options = split_options("download", words, {"--only": "", "--to": ""})
    if len(repos) != 1 or len(repos[0].split("/")) != 2:
        raise UserError(f"download takes one REPO, OWNER/NAME, not {' '.join(repos) or 'nothing'}")
    only = options["--only"]
    if only and only not in FILES:
        close = nearest(only, FILES)
        raise UserError(f"--only {only}: there are {' and '.join(FILES)}" + f"; did you mean {close}?" * bool(close))
    patterns = FILES[only] if only else [pattern for kind in FILES.values() for pattern in kind]
    return repos[0], patterns, Path(options["--to"] or f"assets/hf/{repos[0].split('/')[1]}")


def _download(repo: str, patterns: list[str], folder: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        raise UserError("download needs huggingface_hub: pip install 'titanlite[hf]'") from None
    try:
        snapshot_download(repo, allow_patterns=patterns, local_dir=folder)
    except GatedRepoError:
        raise UserError(
            f"{repo} is gated: ask for access at https://huggingface.co/{repo}, and set HF_TOKEN to a token of yours"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"there is no {repo} on the hub, or it is private: then set HF_TOKEN") from None
    except HFValidationError as error:
        raise UserError(f"{repo} can't be the name of a repository: {first_line(error)}") from None
    except Exception as error:  # the network, the disk, and what else the library lets through
        raise UserError(f"{repo} could not be fetched: {first_line(error)}") from None
    if not any(folder.glob(pattern) for pattern in patterns):
        raise UserError(f"{repo} has none of {', '.join(patterns)}")
    return folder
