"""The status page: HTML, styles and scripts of this package, without external resources.

The page itself holds no secret and needs no key; it fetches its data with the key that the reader
types. Its references are relative, so that it works behind any proxy.
"""

from __future__ import annotations

from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE = "/ui"
PAGE_FILES = f"{PAGE}/{{name}}"  # path of what the page refers to
_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_INDEX = "index.html"
_BASE = b"{base}"  # in the page: what leads from it to its files


class StatusPage:
    """Serves the page's files, which are read once."""

    def __init__(self) -> None:
        folder = files(__package__) / "static"
        self._files = {
            each.name: each.read_bytes()
            for each in folder.iterdir()
            if each.name.rpartition(".")[2] in _KINDS
        }

    async def page(self, request: Request) -> Response:
        """Return the page, with or without a slash behind its path."""
        is_folder = request.scope.get("raw_path", b"").endswith(b"/")
        html = self._files[_INDEX].replace(_BASE, b"" if is_folder else b"ui/")
        return Response(html, headers=_HEADERS | {"content-type": _KINDS["html"]})

    async def file(self, request: Request) -> Response:
        """Return a file that the page refers to. Raise HTTPException 404 for an unknown name."""
        name = request.path_params["name"]
        if name == _INDEX or name not in self._files:
            raise HTTPException(404)
        kind = _KINDS[name.rpartition(".")[2]]
        return Response(self._files[name], headers=_HEADERS | {"content-type": kind})
