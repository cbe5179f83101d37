"""Bounds on the shape of a body, checked without parsing its JSON.

A JSON value takes a few bytes in a body and a hundred once it is parsed, so the number of values is
bounded first.
"""

from __future__ import annotations

import re

from surestep_common.errors import InvalidRequest, RequestTooLarge

MAX_CONTAINERS = 1 << 20  # objects and lists in one body
MAX_IDS = 1 << 20  # in one list of token ids, or four times what fits if that is more
MAX_ALL_IDS = 1 << 23  # in all such lists
TOO_MUCH_MEMORY = "the request takes more memory to prepare than it may"

# One without an end goes on to the end: looked for at each quote, that would take quadratic time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_IDS = re.compile(rb'"(prompt|tokens)"\s*:\s*(\[[\d\s,\[\]]*)')


def check_shape(raw: bytes | bytearray, max_model_len: int) -> None:
    """Raise InvalidRequest or RequestTooLarge."""
    for found in _IDS.finditer(raw):
        _check_ids(found[1].decode(), found[2], max(MAX_IDS, 4 * max_model_len))
    if _containers(raw) > MAX_CONTAINERS and _containers(_STRING.sub(b"", raw)) > MAX_CONTAINERS:
        raise RequestTooLarge(f"the body must have at most {MAX_CONTAINERS} objects and lists")


def _containers(raw: bytes | bytearray) -> int:
    return raw.count(b"{") + raw.count(b"[")


def _check_ids(param: str, lists: bytes, most: int) -> None:
    """Check `lists`, which contain only numbers, commas and brackets."""
    if lists.count(b",") < most:
        return
    longest = max(part.count(b",") for part in lists.split(b"]"))
    if longest >= most or lists.count(b",") >= MAX_ALL_IDS:
        raise InvalidRequest(
            f"{param} has {lists.count(b',') + 1} token ids, more than any request may have",
            param=param,
        )
