"""Incremental search for stop strings and other markers in a growing text."""

from __future__ import annotations

from typing import NamedTuple


class ScanResult(NamedTuple):
    """Decision on a piece of text. Without a marker, `after` is empty."""

    before: str  # safe to use: no marker begins in it
    marker: str | None
    after: str


class MarkerScanner:
    """Finds the leftmost marker, the shortest where several begin there.

    Text that may be the start of a marker is held back until that is decided. After a match the
    scanner starts again.
    """

    def __init__(self, *markers: str) -> None:
        self._markers = markers
        self._first = frozenset(marker[0] for marker in markers)
        self._held = ""

    def push(self, text: str) -> ScanResult:
        """Add text and return what it decides."""
        if not self._held and self._first.isdisjoint(text):
            return ScanResult(text, None, "")
        window = self._held + text
        found = [(at, len(one), one) for one in self._markers if (at := window.find(one)) >= 0]
        if found:
            at, length, marker = min(found)
            self._held = ""
            return ScanResult(window[:at], marker, window[at + length :])
        safe = len(window) - max(_overlap(window, marker) for marker in self._markers)
        self._held = window[safe:]
        return ScanResult(window[:safe], None, "")

    def flush(self) -> str:
        """Return the text held back for a marker that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `marker`."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0
