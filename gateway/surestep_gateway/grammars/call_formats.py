"""How calls are written, in the formats of the parsers that read them, and their languages.

Texts are as the checkpoints' templates write them, so that what is certain is certain to the token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from surestep_gateway.parsers.schema import resolved

from .language import ANYTHING, TAG, IsToken, Json, inline, markers, quoted, up_to

Schemas = Mapping[str, Json | None]  # of parameters, by functions; None: they may be anything

_STYLE: Json = {
    "whitespace_flexible": False,
    "key_separator": ": ",
    "item_separator": ", ",
    "lenient": True,
}


class CallFormat(NamedTuple):
    """The texts of a format, with `{name}`, `{json_name}`, `{key}` and `{string}` to be put in."""

    begin: str  # of a call, in front of the arguments
    end: str
    # Around the value of a parameter; None: the arguments are one JSON object.
    parameter: tuple[str, str] | None = None
    section: tuple[str, str] = ("", "")  # around all calls
    between: str = "\n"  # two calls
    arguments: str = ""  # the key of arguments, where a call is one JSON object and nothing else


_TOOL_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_GLM = CallFormat(
    "<tool_call>{name}",
    "</tool_call>",
    ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
    between="",
)
_CODER = CallFormat(
    "<tool_call>\n<function={name}>\n",
    "</function>\n</tool_call>",
    ("<parameter={key}>\n", "\n</parameter>\n"),
)
FORMATS = {
    "hermes": CallFormat('<tool_call>\n{{"name": {json_name}, "arguments": ', "}}\n</tool_call>"),
    "llama3_json": CallFormat("", "", arguments="parameters", between="; "),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "glm45": CallFormat(
        f"{_GLM.begin}\n",
        _GLM.end,
        ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    "glm47": _GLM,
    "deepseek_v3": CallFormat(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        section=_TOOL_CALLS,
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        section=_TOOL_CALLS,
        between="",
    ),
    "deepseek_v32": CallFormat(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>",
        ('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n"),
        ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    ),
    "minimax_m2": CallFormat(
        '<invoke name="{name}">\n',
        "</invoke>",
        ('<parameter name="{key}">', "</parameter>\n"),
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
}


def written(text: str, is_token: IsToken, **put_in: str) -> str:
    """Return a text as a Lark expression: tags that are tokens are no text."""
    parts = (
        part.format(**put_in) if "{" in part or "}" in part else part for part in TAG.split(text)
    )
    return markers(parts, is_token)


def call_rules(form: CallFormat, schemas: Schemas, is_token: IsToken) -> str:
    """Return the rule `call`, a call behind the first marker of the text, and what it needs."""
    begin = form.begin if form.section[0] else form.begin.removeprefix(first_tag(form))
    rules, bodies = [], []
    for number, (name, schema) in enumerate(schemas.items()):
        lead = written(begin, is_token, name=name, json_name=json.dumps(name, ensure_ascii=False))
        if form.arguments:
            body = inline(_object(name, form.arguments, schema))
        elif form.parameter is None:
            body = f"{arguments(schema)} {written(form.end, is_token)}"
        elif schema is None:
            body = "call_rest"
        else:
            named = list(_parameters(form.parameter, schema, is_token))
            labels = [f"call_{number}_{place}" for place in range(len(named))]
            rules += [f"{label}: {rule}\n" for label, (rule, _) in zip(labels, named, strict=True)]
            taken = [
                label if needed else f"{label}?"
                for label, (_, needed) in zip(labels, named, strict=True)
            ]
            body = " ".join([*taken, written(form.end, is_token)])
        bodies.append(f"{lead} {body}")
    shared = "" if form.parameter is None else _free(form, is_token)
    return f"call: {' | '.join(bodies)}\n{''.join(rules)}{shared}"


def first_tag(form: CallFormat) -> str:
    """Return the marker with which the calls of an output begin; empty without one."""
    return next(iter(TAG.findall(form.section[0] or form.begin)), "")


def arguments(schema: Json | None) -> str:
    """Return the language of arguments as JSON."""
    return inline(_allowed(schema) | {"x-guidance": _STYLE})


def _allowed(schema: Json | None) -> Json:
    return schema or {"type": "object"}


def _object(name: str, key: str, schema: Json | None) -> Json:
    allowed = _allowed(schema)
    return _definitions(allowed) | {
        "type": "object",
        "properties": {"name": {"const": name}, key: allowed},
        "required": ["name", key],
        "additionalProperties": False,
        "x-guidance": _STYLE,
    }


def _definitions(schema: Json) -> Json:
    """Return the definitions of a schema, which its parts refer to from its root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _parameters(
    form: tuple[str, str], schema: Json, is_token: IsToken
) -> Iterator[tuple[str, bool]]:
    """Yield the language of each parameter, and whether there must be one."""
    for key, value in (schema.get("properties") or {}).items():
        ways = []
        for is_string, text in _values(value, schema, form[1], is_token):
            string = "true" if is_string else "false"
            ways.append(f"{written(form[0], is_token, key=key, string=string)} {text}")
        yield " | ".join(ways), key in (schema.get("required") or ())


def _values(schema: Any, whole: Json, end: str, is_token: IsToken) -> Iterator[tuple[bool, str]]:
    """Yield the languages of a value and its end. Strings are written as they are, others as JSON,
    and what may be either in each way.
    """
    known = _target(schema, whole)
    either = known.get("anyOf") or known.get("oneOf") or ()
    kinds = known.get("type")
    choices = known.get("enum") or [known[key] for key in ("const",) if key in known]
    texts = [str(one) for one in choices if isinstance(one, str) or kinds == "string"]
    others = [one for one in choices if not isinstance(one, str) and kinds != "string"]
    if either and "type" not in known:
        for one in either:
            yield from _values(one, whole, end, is_token)
    elif texts:
        yield True, f"({' | '.join(map(quoted, texts))}) {written(end, is_token)}"
        if others:
            yield from _values({"enum": others}, whole, end, is_token)
    elif isinstance(kinds, list) and "string" in kinds and not choices:
        for kind in kinds:
            yield from _values(known | {"type": kind}, whole, end, is_token)
    elif kinds == "string":
        yield True, "call_string"
    else:
        json_value = inline(_definitions(whole) | known | {"x-guidance": _STYLE})
        yield False, f"{json_value} {written(end, is_token)}"


def _target(schema: Any, whole: Json) -> Json:
    """Return the schema of a value, or what it refers to where that says which values there are."""
    known: Json = schema if isinstance(schema, dict) else {}
    target = resolved(known["$ref"], whole) if isinstance(known.get("$ref"), str) else None
    is_plain = isinstance(target, dict) and not {"type", "enum", "const"}.isdisjoint(target)
    return target if isinstance(target, dict) and is_plain else known


def _free(form: CallFormat, is_token: IsToken) -> str:
    """Return the rules of a string, and of the arguments of a function without a schema."""
    assert form.parameter is not None
    lead, end = form.parameter
    rest = _up_to_text("call_rest", form.end, is_token)
    tags = [tag for tag in TAG.findall(lead + end) if is_token(tag)]
    if tags:  # text alone has none of them
        inside = f"({ANYTHING} ({' | '.join(tags)}))* {ANYTHING}"
        rest = f"call_rest: {inside} {written(form.end, is_token)}\n"
    return _up_to_text("call_string", end, is_token) + rest


def _up_to_text(rule: str, end: str, is_token: IsToken) -> str:
    """Return a rule of any text and its end."""
    before, tag, after = TAG.split(end, maxsplit=1)
    if is_token(tag):
        return f"{rule}: {ANYTHING} {written(end, is_token)}\n"
    text = f"{rule}_text"
    return f"{rule}: {text} {written(after, is_token)}\n{text}[lazy]: {up_to(before + tag)}\n"
