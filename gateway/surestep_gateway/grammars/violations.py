"""Where a finished answer is not what its schema asks for. For text processes: such a check may
take any time.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.validators import validator_for
from referencing import Registry

from .language import Json
from .structured import parsed_json
from .widening import with_numeric_bounds

MOST = 8  # that are told of an answer
_SHOWN_CHARS = 300  # of each


def violations_of(schema: Json, text: str) -> list[Json]:
    """Return where JSON text violates a client's schema; formats are annotations.

    A check that is not possible is a violation that says so.
    """
    try:
        value = parsed_json(text)
        kind: Any = validator_for(schema, default=Draft202012Validator)
        if kind is not Draft4Validator:  # some write its bounds under later names
            schema = with_numeric_bounds(schema)
        checker = kind(schema, registry=Registry())  # which fetches nothing
        found = islice(checker.iter_errors(value), MOST)
        return [_violation(one.message, one.json_path) for one in found]
    except Exception as error:  # noqa: BLE001  # of what clients write: patterns, references, depth
        return [_violation(f"it could not be checked: {error or type(error).__name__}")]


def _violation(message: str, path: str = "$") -> Json:
    return {"path": path[:_SHOWN_CHARS], "message": message[:_SHOWN_CHARS]}
