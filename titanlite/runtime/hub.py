"""Hugging Face's hub, by huggingface_hub: buckets, hf://buckets/OWNER/NAME, and models,
hf://OWNER/NAME.

A bucket has no conditional writes, so nothing keeps a second writer out, and no S3 endpoint. Bytes
go to a store by their content, then their name goes into the bucket: a file is whole or not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

from titanlite.errors import UserError
from titanlite.runtime.bucket import Bucket, BucketError, explain
from titanlite.runtime.store import draft_folder

_MODEL = re.compile(r"hf://([^/]+/[^/]+)")
_TIMEOUT = 15  # seconds without an answer, of six tries; the client has no limit of its own
_RETRIES = "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"  # of uploads, each of 2 minutes without an answer


class HubBucket(Bucket):
    """A bucket of Hugging Face, in the process that opened it; it is the store that it calls."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._name = url.removeprefix("hf://buckets/")
        self._store = self
        self._pid = os.getpid()
        with self.explained():
            from huggingface_hub.utils import disable_progress_bars, logging

            disable_progress_bars()
            logging.set_verbosity_error()  # each try that fails would be a line
        os.environ.setdefault(_RETRIES, "2")

    def explained(self, key: str = "") -> Any:
        return _explained(self.url)

    def put(self, key: str, blocks: Iterable[bytes | memoryview], size: int) -> None:
        """Store an object, by way of a file, which is what the client reads."""
        with self.explained(), NamedTemporaryFile() as file:
            file.writelines(blocks)
            file.flush()
            self._api.batch_bucket_files(self._name, add=[(file.name, key)])

    def blocks(self, key: str) -> Iterator[bytes]:
        return self.in_ranges(key, self.call("head", key)["size"])

    # ---------------------------------------------------------------- as obstore's

    @property
    def _api(self) -> Any:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import get_session

        get_session().timeout = _TIMEOUT  # here: a connection that failed leaves another session
        return HfApi()

    def list_with_delimiter(self, key: str) -> dict[str, Any]:
        from huggingface_hub import BucketFile

        found = self._tree(key, recursive=False)
        folders = [each["path"] for each in found if each["type"] == "directory"]
        files = [_entry(BucketFile(**each)) for each in found if each["type"] == "file"]
        return {"common_prefixes": folders, "objects": files}

    def list(self, key: str) -> Iterator[Any]:
        yield self._tree(key, recursive=True)

    def _tree(self, key: str, recursive: bool) -> Sequence[Any]:
        from huggingface_hub.utils import build_hf_headers, paginate

        # Not list_bucket_tree, which waits for ever.
        url = f"{self._api.endpoint}/api/buckets/{self._name}/tree/{quote(key, safe='')}"
        options = {"recursive": recursive}
        found = paginate(url.rstrip("/"), options, build_hf_headers(), timeout=_TIMEOUT)
        # The hub takes a prefix by its letters: step-1 also lists step-10.
        return [each for each in found if not key or each["path"].startswith(f"{key}/")]

    def head(self, key: str) -> dict[str, Any]:
        for found in self._api.get_bucket_paths_info(self._name, [key]):
            return _entry(found)
        raise FileNotFoundError(key)

    def delete(self, keys: str | Sequence[str]) -> None:
        keys = [keys] if isinstance(keys, str) else keys
        found = self._api.get_bucket_paths_info(self._name, keys)  # of others a delete may fail
        self._api.batch_bucket_files(self._name, delete=[each.path for each in found])

    def get(self, key: str, options: dict[str, Any]) -> Any:
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        start, end = options["range"]
        headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        url = f"{self._api.endpoint}/buckets/{self._name}/resolve/{quote(key)}"
        answer = http_backoff(
            "GET", url, headers=build_hf_headers(headers=headers), timeout=_TIMEOUT
        )
        if answer.status_code == 404:
            raise FileNotFoundError(key)
        hf_raise_for_status(answer)
        if answer.status_code != 206:
            raise RuntimeError(f"{key} was not answered by range")
        size = int(answer.headers["Content-Range"].rpartition("/")[2])
        first = [*answer.history, answer][0]  # it leads to a host with tags of its own
        tag = first.headers.get("X-Xet-Hash") or answer.headers.get("ETag")
        return SimpleNamespace(bytes=lambda: answer.content, meta={"size": size, "e_tag": tag})


def _entry(found: Any) -> dict[str, Any]:
    return {"path": found.path, "size": found.size, "last_modified": found.mtime}


def refuse_existing(url: str) -> None:
    """Raise unless a URL names a model without weights, or one that is not there."""
    if not (model := _MODEL.fullmatch(url)):
        raise UserError(f"{url}: legal: a folder, or hf://OWNER/NAME, a model of Hugging Face")
    with _explained(url):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RepositoryNotFoundError

        names = []
        with suppress(RepositoryNotFoundError):  # nor do all tokens see a private one
            names = HfApi().list_repo_files(model[1])
    if any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{url} has weights, and an export overwrites nothing")


@contextmanager
def uploaded(url: str, message: str) -> Iterator[Path]:
    """Yield the name of a folder, which is uploaded when it is written: to a model that is there,
    or a new one, which is private.
    """
    name = url.removeprefix("hf://")
    with _explained(url):
        from huggingface_hub import HfApi

        hub = HfApi()
        hub.create_repo(name, private=True, exist_ok=True)
    with draft_folder() as drafts:
        folder = drafts / "export"
        yield folder
        with _explained(url):
            hub.upload_folder(repo_id=name, folder_path=folder, commit_message=message)


@contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raise what the client raises as one line."""
    try:
        import huggingface_hub  # noqa: F401
        from httpx2 import HTTPError
    except ImportError:
        raise BucketError(f'{url}: pip install "titanlite[hf]" for Hugging Face') from None
    try:
        yield
    except (HTTPError, ConnectionError, RuntimeError, ValueError) as error:
        raise explain(url, error) from None
