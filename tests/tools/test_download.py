"""`titanlite download` against a hub of our own: what it fetches, what it asks for, and one line for each failure."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.launch.run import environment

pytest.importorskip("huggingface_hub", reason="download needs the extra hf")

FILES = {
    "tokenizer.json": b"{}" * 9,
    "tokenizer_config.json": b"{}",
    "config.json": b"{}",
    "model.safetensors": b"0123",
    "pytorch_model.bin": b"not this",
}
REVISION = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, self.headers.get("Authorization")))  # type: ignore[attr-defined]
        if "/gated" in self.path:
            return self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        if "/small" not in self.path:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if self.path.startswith("/api/models/own/small/tree"):
            tree = [{"type": "file", "path": name, "size": len(body), "oid": name} for name, body in FILES.items()]
            return self._answer(200, json.dumps(tree).encode())
        if self.path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            return self._answer(
                200, json.dumps({"id": "own/small", "sha": REVISION, "siblings": siblings, "private": False}).encode()
            )
        name = self.path.rsplit("/", 1)[1]
        return self._answer(200, FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": REVISION})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def download(hub, folder, *words: str, **environ: str) -> tuple[int, str, str]:
    environ = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "hf"), **environ}
    command = [sys.executable, "-m", "titanlite", "download", *words]
    done = subprocess.run(command, env=environment(**environ), cwd=folder, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def found(folder) -> set[str]:
    return {path.name for path in folder.glob("*") if path.is_file()}


def test_only_the_tokenizer_is_fetched_into_the_default_folder_and_not_twice(hub, tmp_path):
    code, out, err = download(hub, tmp_path, "own/small", "--only", "tokenizer", HF_TOKEN="hf_secret")
    assert code == 0, err
    assert "assets/hf/small" in out and found(tmp_path / "assets/hf/small") == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert {token for _, path, token in hub.seen if "small" in path} == {"Bearer hf_secret"}
    hub.seen.clear()
    assert download(hub, tmp_path, "own/small", "--only=tokenizer")[0] == 0
    assert not [path for verb, path, _ in hub.seen if verb == "GET" and "/resolve/" in path]


def test_without_only_weights_and_config_come_as_well(hub, tmp_path):
    code, _, err = download(hub, tmp_path, "own/small", "--to", "here")
    assert code == 0, err
    assert found(tmp_path / "here") == FILES.keys() - {"pytorch_model.bin"}
    assert (tmp_path / "here" / "model.safetensors").read_bytes() == b"0123"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["own/gated"], "own/gated is gated: ask for access at https://huggingface.co/own/gated, and set HF_TOKEN"),
        (["own/none"], "there is no own/none on the hub, or it is private"),
        (["small"], "download takes one REPO, OWNER/NAME, not small"),
        (["own/small", "--only", "token"], "--only token: there are tokenizer and weights; did you mean tokenizer?"),
        (["own/small", "--into", "x"], "download has no option --into; did you mean --to?"),
        (["own/s mall"], "own/s mall can't be the name of a repository"),
    ],
)
def test_each_failure_is_one_line_and_exit_code_2(hub, tmp_path, words, says):
    code, out, err = download(hub, tmp_path, *words)
    assert (code, out) == (2, "") and says in err
    assert len(err.strip().splitlines()) == 1


def test_no_network_is_one_line_and_exit_code_2(hub, tmp_path):
    code, _, err = download(hub, tmp_path, "own/small", HF_ENDPOINT="http://127.0.0.1:9")
    assert code == 2 and "own/small could not be fetched: " in err and "refused" in err
    assert len(err.strip().splitlines()) == 1
