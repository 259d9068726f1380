"""A small hub of Hugging Face on loopback: buckets and repositories of models as its client's own
requests expect them, and the store by content (Xet, version 1) that both upload into.

What the real one answers beyond that was not seen here.
"""

import base64
import json
import re
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

BUCKET, MODEL, TOKEN = "me/runs", "me/model", "hf_test"
URL = f"hf://buckets/{BUCKET}/run"
_NOW = "2026-11-27T12:00:00.000Z"
Answer = tuple[int, dict[str, str], bytes]


def needs_extra() -> None:
    for package in ("huggingface_hub", "hf_xet", "pyarrow"):
        pytest.importorskip(package)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what the server did wrong, not that a client has ended its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The server. `rule(method, path)` returns a status to answer instead, if any."""

    def __init__(self) -> None:
        self.rule: Callable[[str, str], int | None] = lambda method, path: None
        self.files: dict[str, str] = {}
        """Of the bucket: names of contents."""
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private = False
        self._contents: dict[str, bytes] = {}
        self._xorbs: dict[str, list[bytes]] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # or each body waits for an acknowledgement

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, headers, content = hub._answer(self.command, self.path, self.headers, body)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_POST = do_HEAD = do_GET

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def content(self, name: str) -> bytes:
        return self._contents[self.files[name]]

    def _answer(self, method: str, target: str, headers: Any, body: bytes) -> Answer:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        if status := self.rule(method, path):
            return status, {}, b""
        if path.startswith("/cas/"):
            return self._cas(path.removeprefix("/cas/v1/"), body)
        if path.startswith("/cdn/"):  # a signed URL, so the token must not get there
            assert "Authorization" not in headers
            return _part(self._contents[path.removeprefix("/cdn/")], headers["Range"])
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        if "/xet-write-token" in path:
            return _json({"casUrl": f"{self.url}/cas", "exp": 1 << 40, "accessToken": "cas"})
        if found := re.fullmatch(r"/(?:api/)?buckets/([^/]+/[^/]+)/(.*)", path):
            if found[1] != BUCKET:
                return 404, {"X-Error-Code": "RepoNotFound"}, b""
            what, _, key = found[2].partition("/")
            return self._bucket(what, unquote(key), query, body)
        return self._repository(path, body)

    def _bucket(self, what: str, key: str, query: Any, body: bytes) -> Answer:
        if what == "resolve":
            if key not in self.files:
                return 404, {"X-Error-Code": "EntryNotFound"}, b""
            name = self.files[key]
            host = self.url.replace("127.0.0.1", "localhost")  # another one, as a CDN is
            return 302, {"Location": f"{host}/cdn/{name}", "X-Xet-Hash": name}, b""
        if what == "tree":
            return _json(self._tree(key, query.get("recursive") == ["true"]))
        if what == "paths-info":
            names = json.loads(body)["paths"]
            return _json([self._entry(name) for name in names if name in self.files])
        assert what == "batch"
        failed = []
        for line in map(json.loads, body.splitlines()):
            if line["type"] == "addFile":
                assert line["xetHash"] in self._contents, "a name before its content"
                self.files[line["path"]] = line["xetHash"]
            elif self.files.pop(line["path"], None) is None:
                failed.append({"path": line["path"], "error": "not found"})
        return _json({"failed": failed})

    def _entry(self, name: str) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(self.content(name))}
        return {**entry, "xetHash": self.files[name], "mtime": _NOW, "uploadedAt": _NOW}

    def _tree(self, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        """List by the letters of a prefix."""
        depth = prefix.count("/") + 2 if prefix else 1
        found: dict[str, dict[str, Any]] = {}
        for name in sorted(self.files):
            if name.startswith(prefix):
                folder = "/".join(name.split("/")[:depth])
                if recursive or folder == name:
                    found[name] = self._entry(name)
                else:
                    found[folder] = {"type": "directory", "path": folder, "uploadedAt": _NOW}
        return [*found.values()]

    def _cas(self, path: str, body: bytes) -> Answer:
        if path.startswith("xorbs/"):
            self._xorbs[path.rpartition("/")[2]] = _chunks(body)
            return _json({"was_inserted": True})
        if path == "shards":
            for name, terms in _files_of(body):
                parts = [self._xorbs[xorb][start:end] for xorb, start, end in terms]
                self._contents[name] = b"".join(sum(parts, []))
            return _json({"result": 1})
        return 404, {}, b""  # newer requests, which the client does without

    def _repository(self, path: str, body: bytes) -> Answer:
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            there = name in self.repos
            self.private |= bool(asked.get("private") or asked.get("visibility") == "private")
            self.repos.setdefault(name, {".gitattributes": b""})
            return _json({"url": f"{self.url}/{name}"}, 409 if there else 200)
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?(?:/(.*))?", path)
        if not found or found[1] not in self.repos:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        files, what = self.repos[found[1]], (found[2] or "").partition("/")[0]
        if what == "preupload":
            asked = json.loads(body)["files"]
            for file in asked:
                is_large = file["path"].endswith(".safetensors")
                file |= {"shouldIgnore": False, "uploadMode": "lfs" if is_large else "regular"}
            return _json({"files": asked})
        if what == "commit":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self._by_sha256(value["oid"])
            url = f"{self.url}/{found[1]}/commit/1"
            return _json({"success": True, "commitOid": "1" * 40, "commitUrl": url})
        assert what == "tree"
        entry = {"type": "file", "oid": "1" * 40}
        return _json([{**entry, "path": name, "size": len(files[name])} for name in files])

    def _by_sha256(self, oid: str) -> bytes:
        from hashlib import sha256

        return next(each for each in self._contents.values() if sha256(each).hexdigest() == oid)


def _json(value: object, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _part(content: bytes, wanted: str) -> Answer:
    start, end = map(int, wanted.removeprefix("bytes=").split("-"))
    part = content[start : end + 1]
    head = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(content)}"}
    return 206, {**head, "ETag": '"cdn"'}, part


def _chunks(xorb: bytes) -> list[bytes]:
    """Return the chunks of a xorb: a header of 8 bytes each, then its bytes, packed or not."""
    import pyarrow

    chunks, at = [], 0
    while at < len(xorb) and xorb[at] == 0:
        packed, kind = int.from_bytes(xorb[at + 1 : at + 4], "little"), xorb[at + 4]
        size = int.from_bytes(xorb[at + 5 : at + 8], "little")
        data, at = xorb[at + 8 : at + 8 + packed], at + 8 + packed
        if kind:
            data = pyarrow.decompress(data, size, "lz4", asbytes=True)
        if kind == 2:  # every fourth byte, then those that follow them
            whole, starts = (
                bytearray(size),
                [sum((size + 3 - k) // 4 for k in range(i)) for i in range(5)],
            )
            for k in range(4):
                whole[k::4] = data[starts[k] : starts[k + 1]]
            data = bytes(whole)
        assert len(data) == size
        chunks.append(data)
    return chunks


def _files_of(shard: bytes) -> Iterator[tuple[str, list[tuple[str, int, int]]]]:
    """Yield the files of a shard, each with the ranges of chunks that it consists of."""
    at = 48
    while shard[at : at + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", shard, at + 32)
        terms = []
        for number in range(1, count + 1):
            entry = shard[at + 48 * number :]
            terms.append((_hash(entry), *struct.unpack_from("<II", entry, 40)))
        yield _hash(shard[at:]), terms
        verified, has_sum = flags >> 31, flags >> 30 & 1
        at += 48 * (1 + count + count * verified + has_sum)


def _hash(name: bytes) -> str:
    return "".join(f"{part:016x}" for part in struct.unpack_from("<4Q", name))


def environment(url: str) -> dict[str, str]:
    """Return the environment in which hf:// is a server."""
    return {"HF_ENDPOINT": url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "", "DO_NOT_TRACK": "1"}
