"""A server on loopback that speaks the part of Google Cloud Storage's XML interface that obstore
uses, with its objects in memory. It was written from what the client sends and what Google
documents; it asks for no credentials.
"""

import json
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.stores.server import BUCKET

Answer = tuple[int, dict[str, object], bytes]


@dataclass
class Stored:
    """A version of an object."""

    content: bytes
    generation: int
    written: float = field(default_factory=time.time)

    @property
    def headers(self) -> dict[str, object]:
        return {
            "ETag": f'"{self.generation}"',
            "x-goog-generation": self.generation,
            "Last-Modified": formatdate(self.written, usegmt=True),
        }


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code


class GoogleServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.port = self.server_address[1]
        self.objects = dict[str, Stored]()
        self.uploads = dict[str, dict[int, bytes]]()
        self.generations = count(1)
        self.lock = threading.Lock()

    def store(self, key: str, content: bytes, only_over: str | None) -> Stored:
        """Store an object, if the one there is of a generation (0: if there is none)."""
        there = self.objects[key].generation if key in self.objects else 0
        if only_over is not None and int(only_over) != there:
            raise Refused(412, "PreconditionFailed")
        self.objects[key] = Stored(content, next(self.generations))
        return self.objects[key]

    def find(self, key: str) -> Stored:
        if key not in self.objects:
            raise Refused(404, "NoSuchKey")
        return self.objects[key]

    def list(self, prefix: str, delimiter: str) -> bytes:
        keys = sorted(key for key in self.objects if key.startswith(prefix))
        folders = set[str]()
        entries = list[str]()
        for key in keys:
            name, inside, _ = key[len(prefix) :].partition(delimiter or "\0")
            if inside:
                folders.add(prefix + name + delimiter)
                continue
            found = self.objects[key]
            written = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.written))
            entries.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(found.content)}</Size>"
                f"<ETag>{found.headers['ETag']}</ETag>"
                f"<LastModified>{written}</LastModified></Contents>"
            )
        for folder in sorted(folders):
            entries.append(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>")
        return f"<ListBucketResult>{''.join(entries)}</ListBucketResult>".encode()


class Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any  # a GoogleServer

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            if bucket != BUCKET:
                raise Refused(404, "NoSuchBucket")
            with self.server.lock:
                status, headers, content = getattr(self, f"on_{self.command.lower()}")(key)
        except Refused as refused:
            status, headers = refused.status, {}
            content = f"<Error><Code>{refused.code}</Code></Error>".encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def on_get(self, key: str) -> Answer:
        if not key:
            query = self.query
            return 200, {}, self.server.list(query.get("prefix", ""), query.get("delimiter", ""))
        found = self.server.find(key)
        asked = self.headers.get("if-match", found.headers["ETag"])
        if asked != found.headers["ETag"]:
            raise Refused(412, "PreconditionFailed")
        part = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if not part:
            return 200, found.headers, found.content
        size = len(found.content)
        start, end = int(part[1]), min(int(part[2]) + 1, size)
        if start >= size:
            raise Refused(416, "InvalidRange")
        where = {"Content-Range": f"bytes {start}-{end - 1}/{size}"}
        return 206, found.headers | where, found.content[start:end]

    on_head = on_get

    def on_put(self, key: str) -> Answer:
        if upload := self.query.get("uploadId"):
            number = int(self.query["partNumber"])
            self.server.uploads[upload][number] = self.body
            return 200, {"ETag": f'"part-{number}"'}, b""
        condition = self.headers.get("x-goog-if-generation-match")
        return 200, self.server.store(key, self.body, condition).headers, b""

    def on_post(self, key: str) -> Answer:
        if "uploads" in self.query:
            upload = f"upload-{next(self.server.generations)}"
            self.server.uploads[upload] = {}
            name = f"<UploadId>{upload}</UploadId>"
            return 200, {}, _result("InitiateMultipartUploadResult", name)
        parts = self.server.uploads.pop(self.query["uploadId"], None)
        if parts is None:
            raise Refused(404, "NoSuchUpload")
        content = b"".join(parts[number] for number in sorted(parts))
        made = self.server.store(key, content, None)
        tag = f"<ETag>{made.headers['ETag']}</ETag>"
        return 200, made.headers, _result("CompleteMultipartUploadResult", tag)

    def on_delete(self, key: str) -> Answer:
        if upload := self.query.get("uploadId"):
            self.server.uploads.pop(upload, None)
        else:
            self.server.find(key)
            del self.server.objects[key]
        return 204, {}, b""


def _result(name: str, content: str) -> bytes:
    return f"<{name}>{content}</{name}>".encode()


@contextmanager
def google() -> Iterator[int]:
    """Run a server with an empty bucket in this process; yield its port."""
    with GoogleServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.port
        server.shutdown()


def account(port: int, folder: Path) -> dict[str, str]:
    """Return the environment in which gs:// is a server on this port."""
    content = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True}
    content |= {"client_email": "", "private_key": "", "private_key_id": ""}
    file = folder / f"account-{port}.json"
    file.write_text(json.dumps(content))
    return {"GOOGLE_SERVICE_ACCOUNT": str(file)}
