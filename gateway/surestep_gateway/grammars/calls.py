"""Languages of tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from surestep_gateway.parsers import HARMONY_CALLS

from .call_formats import (
    NAMES,
    CallFormat,
    Schemas,
    arguments,
    call_format,
    call_rules,
    first_tag,
    text_without,
    written,
)
from .language import Json, Rules, TokenName, quoted, up_to


class Tools(NamedTuple):
    """The functions that may be called."""

    field: str  # of the request, that asks for this
    schemas: Schemas  # closed
    required: bool  # one of them must be called
    parallel: bool = True  # more than one call
    # The client's schemas, each with its place, of functions whose schema here is wider.
    promised: Mapping[str, tuple[str, Json]] = MappingProxyType({})


def calls(tool_format: str, tools: Tools, token: TokenName) -> Rules:
    """Return the language of one call or several, and nothing else."""
    if tool_format == HARMONY_CALLS:
        return Rules("call", _harmony(tools.schemas))
    form = call_format(tool_format, token)
    begin = written(first_tag(form), token)
    rules = call_rules(form, tools.schemas, token)
    expression = f"{begin} {_behind_tag(form, token, several=tools.parallel)}"
    if tools.parallel and not form.section[0]:
        expression += f" ({quoted(form.between)} {begin} call)*"
    return Rules(expression, rules)


def text_with_calls(tool_format: str, tools: Tools, token: TokenName) -> Rules:
    """Return the language of any text whose calls are as their schemas have them.

    What parsers take for other beginnings of calls is not in the text.
    """
    form = call_format(tool_format, token)
    tag = first_tag(form)
    names = "|".join(map(re.escape, tools.schemas))
    begins = [begin.replace(NAMES, names) for begin in form.begins]
    if not tag:  # calls are the whole output, which then begins as no other text does
        whole = calls(tool_format, tools, token)
        bracket = re.escape((form.section[0] or "{")[0])
        told = text_without(begins, rf"/(\s*[^\s{bracket}](?s:.*))?\s*/")
        return Rules(f"({whole.expression}) | TOLD", f"TOLD: {told}\n{whole.rules}")
    behind = _behind_tag(form, token, several=True)
    rules = call_rules(form, tools.schemas, token)
    if token(tag):
        told = text_without([*begins, re.escape(tag)])
        return Rules(f"TOLD ({token(tag)} {behind} TOLD)*", f"TOLD: {told}\n{rules}")
    opened = f"told_open[lazy]: {text_without(begins, up_to(re.escape(tag)))}\n"
    return Rules(f"(told_open {behind})* TOLD", f"{opened}TOLD: {text_without(begins)}\n{rules}")


def _behind_tag(form: CallFormat, token: TokenName, *, several: bool) -> str:
    """Return what follows the first marker, up to the end of a section or, without one, a call."""
    begin, end = form.section
    if not begin:
        return "call"
    more = f" ({quoted(form.between)} call)*" if several else ""
    behind = written(begin.removeprefix(first_tag(form)), token)
    return f"{behind} call{more} {written(end, token)}"


def _harmony(schemas: Schemas) -> str:
    messages = []
    for name, schema in schemas.items():
        recipient = quoted(f"commentary to=functions.{name} ")
        messages.append(f'{recipient} <|constrain|> "json" <|message|> {arguments(schema)}')
    return f"call: <|channel|> ({' | '.join(messages)})\n"
