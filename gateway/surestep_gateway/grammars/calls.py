"""Languages of tool calls, in the formats of the parsers that read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from surestep_gateway.parsers import HARMONY_CALLS

from .language import ANYTHING, Json, Rules, Special, inline, marker, quoted
from .structured import closed

Schemas = Mapping[str, Json | None]  # of parameters, by functions; None: they may be anything

# As models were taught to write calls; what is certain is then certain to the token.
_STYLE: Json = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class Tools(NamedTuple):
    """The functions that may be called."""

    field: str  # of the request, that asks for this
    schemas: Schemas
    required: bool  # one of them must be called
    parallel: bool = True  # more than one call


def calls(tool_format: str, tools: Tools, special: Special) -> Rules:
    """Return the language of one call or several, and nothing else."""
    one = _call(tool_format, tools.schemas, marker(_OPEN, special), marker(_CLOSE, special))
    if not tools.parallel or tool_format == HARMONY_CALLS:
        return one
    return Rules('call ("\\n" call)*', one.rules)


def text_with_calls(tool_format: str, tools: Tools, special: Special) -> Rules:
    """Return the language of any text whose calls are as their schemas have them."""
    close = marker(_CLOSE, special)
    if special(_OPEN):
        one = _call(tool_format, tools.schemas, _OPEN, close)
        return Rules("told (call told)*", f"told: {ANYTHING}\n{one.rules}")
    one = _call(tool_format, tools.schemas, '""', close)
    told = f"told: {ANYTHING}\ntold_open[lazy]: /(?s:.*){_OPEN}/\n"
    return Rules("(told_open call)* told", told + one.rules)


def _call(tool_format: str, schemas: Schemas, begin: str, end: str) -> Rules:
    """Return the language of one call between two Lark expressions; its rule is `call`."""
    if tool_format == HARMONY_CALLS:
        return Rules("call", _harmony(schemas))
    body = _hermes(schemas) if tool_format == "hermes" else _qwen3_coder(schemas)
    return Rules("call", f'call: {begin} "\\n" call_body "\\n" {end}\n{body}')


def _hermes(schemas: Schemas) -> str:
    bodies = []
    for name, schema in schemas.items():
        arguments = _arguments(schema)
        whole = {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "x-guidance": _STYLE,
        }
        bodies.append(inline(whole | _definitions(arguments)))
    return f"call_body: {' | '.join(bodies)}\n"


def _arguments(schema: Json | None) -> Json:
    """Return the schema of a call's arguments: those that the function names, and no others unless
    it says so."""
    return {"type": "object"} if schema is None else closed(schema)


def _harmony(schemas: Schemas) -> str:
    messages = []
    for name, schema in schemas.items():
        arguments = inline(_arguments(schema) | {"x-guidance": _STYLE})
        recipient = quoted(f"commentary to=functions.{name} ")
        messages.append(f'{recipient} <|constrain|> "json" <|message|> {arguments}')
    return f"call: <|channel|> ({' | '.join(messages)})\n"


def _qwen3_coder(schemas: Schemas) -> str:
    rules, bodies = [], []
    for number, (name, schema) in enumerate(schemas.items()):
        begin = quoted(f"<function={name}>\n")
        if schema is None:
            bodies.append(f"{begin} call_rest")
            continue
        parameters = []
        for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
            rule = f"call_{number}_{place}"
            begun = quoted(f"<parameter={key}>\n")
            rules.append(f"{rule}: {begun} {_value(value, schema)}\n")
            parameters.append(rule if key in (schema.get("required") or ()) else f"{rule}?")
        bodies.append(" ".join([begin, *parameters, quoted("</function>")]))
    return (
        f"call_body: {' | '.join(bodies)}\n"
        + "".join(rules)
        + "call_rest[lazy]: /(?s:.*)<\\/function>/\n"
        + "call_string[lazy]: /(?s:.*)\\n<\\/parameter>\\n/\n"
    )


def _value(schema: Any, whole: Json) -> str:
    """Return the language of a value and its end; strings are written as they are."""
    known: Json = schema if isinstance(schema, dict) else {}
    end = "\n</parameter>\n"
    if known.get("type") != "string":
        value = inline(_definitions(whole) | known | {"x-guidance": _STYLE})
        return f"{value} {quoted(end)}"
    choices = known.get("enum")
    if not choices:
        return "call_string"
    return f"({' | '.join(quoted(str(choice) + end) for choice in choices)})"


def _definitions(schema: Json) -> Json:
    """Return the definitions of a schema, which its parts refer to from its root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}
