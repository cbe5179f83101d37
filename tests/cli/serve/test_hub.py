"""GGUF files of the hub, by `owner/name:TYPE`."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from support.checkpoints.least_gguf import write_least
from support.processes.stack import environment

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(NamedTuple):
    """Its address, and the paths of files that were fetched from it."""

    url: str
    fetched: list[str]

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables of a process that uses it, with a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve repositories by their names, each a mapping of paths to contents."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def log_message(self, *args: object) -> None:
            pass

        def _answer(self, *, body: bool) -> None:
            match unquote(urlsplit(self.path).path).strip("/").split("/"):
                case ["api", "models", owner, name, *rest] if f"{owner}/{name}" in repositories:
                    files = repositories[f"{owner}/{name}"]
                    self._json(
                        _listing(files) if rest[:1] == ["tree"] else _about(owner, name, files)
                    )
                case [owner, name, "resolve", _, *path] if "/".join(path) in repositories.get(
                    f"{owner}/{name}", ()
                ):
                    self._file("/".join(path), repositories[f"{owner}/{name}"], body=body)
                case _:
                    self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        def _json(self, value: object) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def _file(self, path: str, files: Mapping[str, bytes], *, body: bool) -> None:
            if body:
                fetched.append(path)
            headers = {"ETag": f'"{_digest(files[path])}"', "X-Repo-Commit": COMMIT}
            self._send(200, files[path], headers, body=body)

        def _send(
            self, status: int, data: bytes, headers: Mapping[str, str], *, body: bool = True
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield Hub(f"http://127.0.0.1:{server.server_address[1]}", fetched)
        finally:
            server.shutdown()
            thread.join(10)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()  # as git names blobs


def _about(owner: str, name: str, files: Mapping[str, bytes]) -> object:
    siblings = [{"rfilename": path} for path in files]
    return {"id": f"{owner}/{name}", "sha": COMMIT, "siblings": siblings}


def _listing(files: Mapping[str, bytes]) -> object:
    return [
        {"type": "file", "path": path, "size": len(data), "oid": _digest(data)}
        for path, data in files.items()
    ]


TINY, BARE, PLAIN = "owner/tiny-GGUF", "owner/bare", "owner/plain"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    model = write_least(tmp_path_factory.mktemp("model") / "least.gguf").read_bytes()
    tiny = {
        "README.md": b"# A model",
        "config.json": b"{}",
        "mmproj-Q4_K_M.gguf": b"no model",
        "tiny-BF16.gguf": b"not wanted",
        "tiny-F16.gguf": model,
        "CLOUD-tiny-Q6_K.gguf": model,
        "tiny-Q4_K_M.gguf": model,
        "tiny-UD-Q4_K_M.gguf": model,
        "Q8_0/tiny-q8_0-00001-of-00002.gguf": b"GGUF",
        "Q8_0/tiny-q8_0-00002-of-00002.gguf": b"GGUF.",
    }
    with hub({TINY: tiny, BARE: {"Q5_0.gguf": model}, PLAIN: {"config.json": b"{}"}}) as running:
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def fetch(model: str, files: Hub, home: Path, **variables: str) -> tuple[str, str, set[str]]:
    """Return what `surestep fetch` prints, and which files it has fetched."""
    del files.fetched[:]
    variables = {"XDG_CACHE_HOME": str(home / "cache"), **files.environment(home), **variables}
    command = (sys.executable, "-m", "surestep_cli", "fetch", model)
    done = subprocess.run(
        command, env=environment(variables), capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr, set(files.fetched)


@pytest.mark.parametrize(
    ("model", "fetched"),
    [
        (f"{TINY}:Q4_K_M", "tiny-Q4_K_M.gguf"),
        (f"{TINY}:q4_k_m", "tiny-Q4_K_M.gguf"),
        (f"{TINY}:UD-Q4_K_M", "tiny-UD-Q4_K_M.gguf"),
        (f"{TINY}:F16", "tiny-F16.gguf"),
        (f"{TINY}:q6_K", "CLOUD-tiny-Q6_K.gguf"),
        (f"{BARE}:q5_0", "Q5_0.gguf"),
        (f"hf.co/{TINY}:Q4_K_M", "tiny-Q4_K_M.gguf"),
        (f"https://huggingface.co/{TINY}/blob/main/tiny-F16.gguf", "tiny-F16.gguf"),
    ],
)
@pytest.mark.rotates(1)
def test_the_file_of_a_type_is_fetched(files: Hub, home: Path, model: str, fetched: str) -> None:
    """And found again when the hub is not there."""
    folder, _, asked = fetch(model, files, home)
    assert asked == {fetched}
    assert Path(folder).name == fetched.removesuffix(".gguf")
    assert (Path(folder) / "tokenizer.json").is_file()
    assert fetch(model, files, home, HF_HUB_OFFLINE="1")[::2] == (folder, set())


def test_a_file_in_parts_is_fetched_whole(files: Hub, home: Path) -> None:
    _, said, asked = fetch(f"{TINY}:Q8_0", files, home)
    assert asked == {f"Q8_0/tiny-q8_0-0000{i}-of-00002.gguf" for i in (1, 2)}
    assert "tiny-q8_0-00001-of-00002.gguf: its header is cut off" in said


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (TINY, f"'{TINY}' holds GGUF files: name one of them, as {TINY}:Q4_K_M; "),
        (f"{TINY}:Q2_K", "no GGUF file of type Q2_K: there are Q4_K_M, BF16, F16, Q6_K, q8_0"),
        (f"{PLAIN}:Q4_K_M", "no GGUF file of type Q4_K_M: there are no GGUF files"),
        (f"{TINY}:*", f"'{TINY}:*': after the colon comes a type"),
        ("owner/nobody:Q4_K_M", "cannot fetch 'owner/nobody' from the Hugging Face hub: "),
    ],
)
@pytest.mark.rotates(1)
def test_what_is_said_without_one(files: Hub, home: Path, model: str, said: str) -> None:
    _, message, fetched = fetch(model, files, home)
    assert said in " ".join(message.split())
    assert len(message.splitlines()) < 5
    assert not {path for path in fetched if path.endswith(".gguf")}


def test_a_hub_that_cannot_be_reached_is_told_in_a_line(files: Hub, home: Path) -> None:
    for variables in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HTTP_PROXY": "http://127.0.0.1:9"}):
        _, message, _ = fetch(f"{TINY}:Q4_K_M", files, home, **variables)
        assert f"cannot fetch '{TINY}' from the Hugging Face hub" in " ".join(message.split())
