"""Languages of tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from surestep_gateway.parsers import HARMONY_CALLS

from .call_formats import FORMATS, CallFormat, Schemas, arguments, call_rules, first_tag, written
from .language import ANYTHING, IsToken, Json, Rules, marker, quoted, up_to

_NO_OBJECT = r"/(\s*[^\s{](?s:.*))?\s*/"  # a Lark expression


class Tools(NamedTuple):
    """The functions that may be called."""

    field: str  # of the request, that asks for this
    schemas: Schemas  # closed
    required: bool  # one of them must be called
    parallel: bool = True  # more than one call
    # The client's schemas, each with its place, of functions whose schema here is wider.
    promised: Mapping[str, tuple[str, Json]] = MappingProxyType({})


def calls(tool_format: str, tools: Tools, is_token: IsToken) -> Rules:
    """Return the language of one call or several, and nothing else."""
    if tool_format == HARMONY_CALLS:
        return Rules("call", _harmony(tools.schemas))
    form = FORMATS[tool_format]
    begin = marker(first_tag(form), is_token)
    rules = call_rules(form, tools.schemas, is_token)
    expression = f"{begin} {_behind_tag(form, is_token, several=tools.parallel)}"
    if tools.parallel and not form.section[0]:
        expression += f" ({quoted(form.between)} {begin} call)*"
    return Rules(expression, rules)


def text_with_calls(tool_format: str, tools: Tools, is_token: IsToken) -> Rules:
    """Return the language of any text whose calls are as their schemas have them."""
    form = FORMATS[tool_format]
    tag = first_tag(form)
    if not tag:  # calls are the whole output, and no other text looks like them
        whole = calls(tool_format, tools, is_token)
        return Rules(f"({whole.expression}) | told", f"told: {_NO_OBJECT}\n{whole.rules}")
    behind = _behind_tag(form, is_token, several=True)
    told = f"told: {ANYTHING}\n{call_rules(form, tools.schemas, is_token)}"
    if is_token(tag):
        return Rules(f"told ({tag} {behind} told)*", told)
    return Rules(f"(told_open {behind})* told", f"told_open[lazy]: {up_to(tag)}\n{told}")


def _behind_tag(form: CallFormat, is_token: IsToken, *, several: bool) -> str:
    """Return what follows the first marker, up to the end of a section or, without one, a call."""
    begin, end = form.section
    if not begin:
        return "call"
    more = f" ({quoted(form.between)} call)*" if several else ""
    behind = written(begin.removeprefix(first_tag(form)), is_token)
    return f"{behind} call{more} {written(end, is_token)}"


def _harmony(schemas: Schemas) -> str:
    messages = []
    for name, schema in schemas.items():
        recipient = quoted(f"commentary to=functions.{name} ")
        messages.append(f'{recipient} <|constrain|> "json" <|message|> {arguments(schema)}')
    return f"call: <|channel|> ({' | '.join(messages)})\n"
