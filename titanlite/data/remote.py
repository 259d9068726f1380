"""The index of token shards on an object store: their manifest and tokenizer are copied to the
user's cache. Imports no torch.
"""

import hashlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from titanlite.config.urls import is_url
from titanlite.data.shards import DATA_MANIFEST, TOKENIZER_FILES, bring, parse_manifest, put
from titanlite.errors import OK, UserError, print_notice
from titanlite.runtime import store
from titanlite.runtime.bucket import bucket_path, in_own_process

_PATIENCE_SECONDS = 5  # at a start
_THREADS = 32


def folder_of(key: str, path: str) -> Path:
    """Return a folder of shards; for a URL, the local folder with its manifest and tokenizer.

    Errors name the config section `key`.
    """
    if not is_url(path):
        return Path(path)
    try:
        return _fetch_index(path)
    except UserError as error:
        raise type(error)(f"{key}.dataset_path: {error}") from None


@cache
def _fetch_index(url: str) -> Path:
    return Path(in_own_process("titanlite.data.remote", url))


def main(url: str) -> int:
    """Fetch the index of shards and print its local folder, which is named after the manifest."""
    try:
        root = bucket_path(url, _PATIENCE_SECONDS)
        content = b"{}"
        with suppress(FileNotFoundError):
            content = (root / DATA_MANIFEST).read_bytes()
        if parse_manifest(root / DATA_MANIFEST, content) is None:
            raise UserError(f"{url} has no {DATA_MANIFEST} of `titanlite data prepare`")
        folder = store.user_cache() / "shards" / hashlib.sha256(content).hexdigest()[:16]
        folder.make()
        if not (folder / DATA_MANIFEST).exists():
            for file in TOKENIZER_FILES:
                bring(root, folder / file)
            put(folder / DATA_MANIFEST, content)
    except UserError as error:
        print_notice(str(error))
        return error.code
    except OSError as error:
        print_notice(f"{error}; name a folder for the list of shards in XDG_CACHE_HOME")
        return UserError.code
    print(folder)
    return OK


def at_once(function: Callable[..., object], *columns: Any) -> None:
    """Call a function for each row, in threads, so that requests to a store run in parallel."""
    list(_threads().map(function, *columns))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, "windows")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
