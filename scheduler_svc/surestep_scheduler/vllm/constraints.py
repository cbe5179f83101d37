"""Translate the constraints of a vllm.grpc.engine request into a grammar of llguidance.

No text is known here and nothing is compiled: a rank compiles the grammar before the request waits
for a slot, and says what is wrong with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json
from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_common.request_params import JSON_WHITE_SPACE, MAX_CHOICES, MAX_GRAMMAR_BYTES
from surestep_proto.sampling_pb2 import Grammar
from surestep_proto.vllm_engine_pb2 import SamplingParams as TheirParams

MAX_REGEX_CHARS = 1 << 16  # each may have to be escaped

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_STYLE = {"x-guidance": {"whitespace_pattern": JSON_WHITE_SPACE}}
# In Lark a regular expression stands between slashes, in one line.
_UNLIKE_LARK = re.compile(r"\\.|/|\n", re.DOTALL)
_IN_LARK = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


def grammar_of(params: TheirParams) -> Grammar | None:
    """Return the grammar that a constraint stands for; None without one.

    Raises InvalidRequest naming the field for a constraint that is longer than a grammar may be,
    for a schema that is no JSON object, and for a choice without texts.
    """
    name = params.WhichOneof("constraint")
    if name is None or (name == "json_object" and not params.json_object):
        return None
    _check_size(name, params)
    body: dict[str, Any]
    match name:
        case "json_object":
            body = {"json_schema": _ANY_OBJECT | _STYLE}
        case "json_schema":
            body = {"json_schema": _schema(params.json_schema) | _STYLE}
        case "regex":
            body = {"lark_grammar": f"start: /{_UNLIKE_LARK.sub(_as_lark, params.regex)}/"}
        case "choice":
            body = {"lark_grammar": f"start: CHOICE\nCHOICE: {_one_of(params.choice.choices)}"}
        case "grammar":
            body = {"lark_grammar": params.grammar}
        case _:
            raise UnsupportedParameter(f"{name}: not served over this service", param=name)
    return Grammar(source=json.dumps({"grammars": [body]}, ensure_ascii=False))


def _check_size(name: str, params: TheirParams) -> None:
    """Raise InvalidRequest for a text that is too long to be gone through."""
    size, most = 0, MAX_GRAMMAR_BYTES
    match name:
        case "json_schema" | "grammar":
            size = len(getattr(params, name))
        case "regex":
            size, most = len(params.regex), MAX_REGEX_CHARS
        case "choice":
            size = params.choice.ByteSize()
            if len(params.choice.choices) > MAX_CHOICES:
                size, most = len(params.choice.choices), MAX_CHOICES
    if size > most:
        raise InvalidRequest(f"{name}: a length of {size} is more than {most}", param=name)


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = from_json(text, allow_inf_nan=False)  # neither deep nor with half characters
    except ValueError as error:
        message = f"json_schema: not valid JSON: {error}"
        raise InvalidRequest(message, param="json_schema") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("json_schema: a schema is an object", param="json_schema")
    return schema


def _as_lark(found: re.Match[str]) -> str:
    return _IN_LARK.get(found[0], found[0])


def _one_of(texts: Sequence[str]) -> str:
    if not texts:
        raise InvalidRequest("choice: there must be a text to choose", param="choice")
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
