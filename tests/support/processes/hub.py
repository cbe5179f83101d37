"""A Hugging Face hub on loopback: the part of its HTTP API by which repositories are fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(NamedTuple):
    """Its address, and the paths of files that were fetched from it."""

    url: str
    fetched: list[str]

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process that uses it, with a cache of its own."""
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
