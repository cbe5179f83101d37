"""JSON text of values that clients have sent, whose integers may have any size."""

from __future__ import annotations

import json
from typing import Any

import orjson


def json_text(value: Any) -> bytes:
    """Return the JSON text of a value."""
    try:
        return orjson.dumps(value)
    except TypeError:  # more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
