"""Structural tags: text in which tags and what stands between them are as the request says.

Two forms: `structures` and `triggers`, as in vLLM's first releases, and xgrammar's `format`, an
object that has others inside. https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
from surestep_common.errors import InvalidRequest, UnsupportedParameter

from .config import JsonStyle
from .fields import MAX_STRUCTURES, Structure
from .language import ANYTHING, TAG, Json, Language, TokenName, inline, marked, quoted
from .structured import ANY_OBJECT, exact_schema, grammar_language, styled

_MOST_FORMATS = 16 * MAX_STRUCTURES  # in one request
_TEXT = f"TEXT: {ANYTHING}\n"


def structures_language(
    structures: Sequence[Structure],
    triggers: Sequence[str],
    field: str,
    style: JsonStyle,
    token: TokenName,
) -> Language:
    """Return the language of text in which JSON follows tags. Raise InvalidRequest.

    A structure is `{"begin": ..., "schema": ..., "end": ...}`; it applies where the text has the
    trigger that its beginning begins with.
    """
    if not structures or not triggers:
        raise InvalidRequest(f"{field}: it needs 'structures' and 'triggers'", param=field)
    tags = []
    for number, one in enumerate(structures):
        schema = ANY_OBJECT if one.json_schema is None else one.json_schema
        exact_schema(schema, f"{field}.structures[{number}].schema", style)
        content = {"type": "json_schema", "json_schema": schema}
        tags.append({"begin": one.begin, "content": content, "end": one.end})
    asked = {"type": "triggered_tags", "triggers": list(triggers), "tags": tags}
    return Language(field, lark=_Formats(style, token, "structures").grammar(asked, field))


def format_language(asked: Any, field: str, style: JsonStyle, token: TokenName) -> Language:
    """Return the language of xgrammar's `format`. Raise InvalidRequest, UnsupportedParameter."""
    if isinstance(asked, dict) and asked.get("type") == "grammar":
        return grammar_language(_text(asked, "grammar", field), field)
    return Language(field, lark=_Formats(style, token).grammar(asked, field))


class _Formats:
    """Formats as expressions and rules of one Lark grammar.

    Every expression includes the text `end` that must follow it: that is where free text ends.
    Without one, free text ends with the output and must be `last` in it.
    """

    def __init__(self, style: JsonStyle, token: TokenName, tags_name: str = "tags") -> None:
        self._style, self._token, self._tags_name = style, token, tags_name
        self._rules: list[str] = []
        self._left = _MOST_FORMATS

    def grammar(self, asked: Any, field: str) -> str:
        """Return the grammar of a whole output."""
        start = self._written(asked, field, "", last=True)
        return f"start: {start}\n{_TEXT}{''.join(self._rules)}"

    def _written(self, asked: Any, at: str, end: str, *, last: bool = False) -> str:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequest(f"{at}: more than {_MOST_FORMATS} formats", param=at)
        kind = asked.get("type") if isinstance(asked, dict) else None
        match kind:
            case "any_text":
                return self._any_text(asked, at, end, last=last)
            case "sequence":
                return self._sequence(asked, at, end, last=last)
            case "or":
                ways = self._elements(asked, at)
                either = [self._written(one, place, end, last=last) for place, one in ways]
                return f"({' | '.join(either)})"
            case "tag":
                return f"{self._tag(asked, at)} {self._mark(end)}"
            case "triggered_tags":
                return self._triggered(asked, at, end, last=last)
        return f"{self._fixed(asked, at, kind)} {self._mark(end)}"

    def _fixed(self, asked: Any, at: str, kind: Any) -> str:
        """Return a format that ends by itself."""
        match kind:
            case "const_string":
                return self._mark(_text(asked, "value", at))
            case "json_schema" if asked.get("style", "json") == "json":
                return self._json(asked, f"{at}.json_schema")
            case "regex" if not asked.get("excludes"):
                return f"/{llguidance.regex_to_lark(_text(asked, 'pattern', at))}/"
            case "tags_with_separator":
                return self._separated(asked, at)
            case "optional" | "star" | "plus":
                sign = {"optional": "?", "star": "*", "plus": "+"}[kind]
                return f"({self._written(asked.get('content'), f'{at}.content', '')}){sign}"
        told = "no such format" if kind is None else f"formats of the type {str(kind)[:32]!r}"
        raise UnsupportedParameter(f"'{at}' is not supported: {told}", param=at)

    def _json(self, asked: Json, at: str) -> str:
        schema = asked.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{at}: a schema is an object", param=at)
        return inline(styled(exact_schema(schema, at, self._style), self._style))

    def _any_text(self, asked: Json, at: str, end: str, *, last: bool) -> str:
        if asked.get("excludes") or asked.get("excluded_str"):
            raise UnsupportedParameter(f"'{at}.excludes' is not supported", param=f"{at}.excludes")
        if end:
            return self._up_to(end)
        if not last:
            raise UnsupportedParameter(
                f"'{at}' is not supported: 'any_text' must be the content of a tag with an end, or "
                "the last of all",
                param=at,
            )
        return "TEXT"

    def _up_to(self, end: str) -> str:
        """Return any text and its end: up to the first one, or to the first tag that is a token."""
        before, *rest = TAG.split(end, maxsplit=1)
        if rest and self._token(rest[0]):
            lexeme = self._rule(f"TEXT {quoted(before)}", name="TEXT_")
            return f"{lexeme} {self._mark(end[len(before) :])}"
        return self._rule(f"TEXT {quoted(end)}", "[lazy]")

    def _sequence(self, asked: Json, at: str, end: str, *, last: bool) -> str:
        *first, final = list(self._elements(asked, at))
        parts = [self._written(one, place, "") for place, one in first]
        return " ".join([*parts, self._written(final[1], final[0], end, last=last)])

    def _tag(self, tag: Json, at: str) -> str:
        return f"{self._mark(_text(tag, 'begin', at))} {self._behind(tag, at)}"

    def _behind(self, tag: Json, at: str) -> str:
        """Return what follows the beginning of a tag."""
        ends = tag.get("end", "")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise InvalidRequest(f"{at}.end: it is no text", param=f"{at}.end")
        place = f"{at}.content"
        return f"({' | '.join(self._written(tag.get('content'), place, end) for end in ends)})"

    def _triggered(self, asked: Json, at: str, end: str, *, last: bool) -> str:
        if asked.get("excludes") or end or not last:
            raise UnsupportedParameter(
                f"'{at}' is not supported: 'triggered_tags' must be the last of all, without "
                "'excludes'",
                param=at,
            )
        tags = list(self._elements(asked, at, "tags"))
        triggers = asked.get("triggers")
        triggers = triggers if isinstance(triggers, list) else []
        either = "|".join(self._rule(self._triggered_tag(tag, triggers, at)) for at, tag in tags)
        more = "" if asked.get("stop_after_first") else f"({either})* TEXT"
        if asked.get("at_least_one"):  # at once
            return f"({' | '.join(self._tag(tag, place) for place, tag in tags)}) {more}"
        return more or f"({either} | TEXT)"

    def _triggered_tag(self, tag: Json, triggers: Sequence[str], at: str) -> str:
        """Return a tag with the text in front of it. Tags that are tokens are no text: such a one
        at the beginning of a trigger is the whole trigger.
        """
        begin = _text(tag, "begin", at)
        fitting = (one for one in triggers if isinstance(one, str) and begin.startswith(one))
        trigger = next(fitting, "")
        if not trigger:
            raise InvalidRequest(
                f"{at}.begin: it begins with none of the triggers", param=f"{at}.begin"
            )
        marker = TAG.match(trigger)
        if marker is not None and self._token(marker[0]):
            trigger, lead = marker[0], f"TEXT {marker[0]}"
        else:
            lead = self._rule(f"TEXT {quoted(trigger)}", "[lazy]")
        return f"{lead} {self._mark(begin.removeprefix(trigger))} {self._behind(tag, at)}"

    def _separated(self, asked: Json, at: str) -> str:
        tags = [self._tag(tag, place) for place, tag in self._elements(asked, at, "tags")]
        either = self._rule(f"({' | '.join(tags)})")
        more = (
            ""
            if asked.get("stop_after_first")
            else (f" ({self._mark(str(asked.get('separator') or ''))} {either})*")
        )
        return f"({either}{more}){'' if asked.get('at_least_one') else '?'}"

    def _elements(self, asked: Json, at: str, key: str = "elements") -> Iterator[tuple[str, Any]]:
        """Yield the formats in a list with their places. Raise InvalidRequest for none."""
        name = self._tags_name if key == "tags" else key
        given = asked.get(key)
        if not isinstance(given, list) or not given:
            raise InvalidRequest(f"{at}.{name}: a list of formats is needed", param=f"{at}.{name}")
        for number, one in enumerate(given):
            place = f"{at}.{name}[{number}]"
            if not isinstance(one, dict):
                raise InvalidRequest(f"{place}: a format is an object", param=place)
            yield place, one

    def _mark(self, text: str) -> str:
        return marked(text, self._token)

    def _rule(self, body: str, how: str = "", name: str = "tag_") -> str:
        name += str(len(self._rules))
        self._rules.append(f"{name}{how}: {body}\n")
        return name


def _text(asked: Json, key: str, at: str) -> str:
    text = asked.get(key)
    if not isinstance(text, str):
        raise InvalidRequest(f"{at}.{key}: it is no text", param=f"{at}.{key}")
    return text
