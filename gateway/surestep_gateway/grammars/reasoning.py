"""Languages of whole outputs: reasoning in front, which is free, then what is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from surestep_common.errors import UnsupportedParameter

from surestep_gateway.parsers import HARMONY_REASONING, ReasoningParser

from .calls import Tools, calls, text_with_calls
from .language import (
    ANYTHING,
    Json,
    Language,
    Rules,
    TokenName,
    checked,
    marker,
    pattern,
    source_of,
    up_to,
)

THINKING_BUDGET = "thinking_token_budget"
_GAP = "/\\n{0,2}/"  # between reasoning and content, as templates have it
_BODY = Rules("@body")


class Wanted(NamedTuple):
    """The wishes of a request for its output; at least one of them."""

    content: Language | None = None
    tools: Tools | None = None
    thinking: int | None = None  # most tokens of reasoning; None: any number

    @property
    def field(self) -> str:
        """The request's field that asks for it."""
        if self.content is not None:
            return self.content.field
        return self.tools.field if self.tools is not None else THINKING_BUDGET

    def promised(self) -> dict[str, tuple[str, Json]]:
        """Return the client's schemas that are narrower than the grammar, each with its field, by
        names of functions; the content's has none.
        """
        found = {}
        if self.content is not None and self.content.promised is not None:
            found[""] = self.content.field, self.content.promised
        if self.tools is not None:
            found |= self.tools.promised
        return found


class Format(NamedTuple):
    """The way the model writes, and where in its output it is: `parser` has read what there is."""

    reasoning: str | None  # names of the parsers
    tools: str | None
    parser: ReasoningParser | None
    token: TokenName
    token_id: Callable[[str], int | None] = lambda _: None

    def is_token(self, marker: str) -> bool:
        """Return whether a marker is a token, which no text is to a grammar."""
        return bool(self.token(marker))


class Constraint(NamedTuple):
    """A grammar's source, and the token behind which it begins, if it does not begin at once."""

    source: str
    begins_after: str | None = None


def constraint(wanted: Wanted, written: Format) -> Constraint:
    """Return the grammar of an output. Raise InvalidRequest naming the field."""
    begins_after, parser = None, written.parser
    if written.reasoning == HARMONY_REASONING:
        rules = _harmony(wanted, written)
    elif parser is None:
        rules = _plain(wanted, written)
    else:
        opened, close = parser.markers
        _check_bound(wanted, written)
        rules = _tagged(_plain(wanted, written), written, parser.answer)
        barred = parser.also_ends if wanted.tools is not None else ()
        free = wanted.thinking is None and not barred
        if parser.reasoning and written.is_token(close) and free:
            # Free text costs nothing where no grammar follows it.
            begins_after = close
            rules = Rules(f"{_GAP} ({rules.expression})", rules.rules)
        elif parser.reasoning or (parser.may_reason and written.is_token(opened)):
            rules = _behind_thought(rules, written, parser, barred, wanted.thinking)
    bodies = {"body": wanted.content} if "@body" in rules.expression + rules.rules else {}
    source = source_of(rules, {name: body for name, body in bodies.items() if body is not None})
    return Constraint(checked(source, wanted.field), begins_after)


def _plain(wanted: Wanted, written: Format) -> Rules:
    """Return the language behind the reasoning."""
    tools = wanted.tools
    if wanted.content is None and tools is None:
        return _anything(written)
    if tools is None or written.tools is None:
        return _BODY
    if tools.required:
        return calls(written.tools, tools, written.token)
    if wanted.content is not None:
        called = calls(written.tools, tools, written.token)
        return Rules(f"({called.expression}) | @body", called.rules)
    return text_with_calls(written.tools, tools, written.token)


def _tagged(content: Rules, written: Format, tags: tuple[str, ...]) -> Rules:
    """Return the language of content that may stand between tags, if there are `tags`."""
    if not tags:
        return content
    begin, end = (marker(tag, written.token) for tag in tags)
    expression = f"(/\\n?/ {begin} /\\n?/)? ({content.expression}) (/\\n?/ {end})?"
    return Rules(expression, content.rules)


def _check_bound(wanted: Wanted, written: Format) -> None:
    """Raise UnsupportedParameter for a tokenizer that leaves a bound of reasoning no place."""
    markers = written.parser.markers if written.parser is not None else ()
    if wanted.thinking is not None and not all(map(written.is_token, markers)):
        raise UnsupportedParameter(
            f"'{THINKING_BUDGET}': the tokenizer has no tokens {' and '.join(markers)}",
            param=THINKING_BUDGET,
        )


def _anything(written: Format) -> Rules:
    """Return the language of anything but more reasoning."""
    opened = written.parser.markers[0] if written.parser is not None else ""
    return Rules(f"<[^{written.token_id(opened)}]>*")


def _behind_thought(
    content: Rules,
    written: Format,
    parser: ReasoningParser,
    barred: tuple[str, ...],
    most: int | None,
) -> Rules:
    """Return the language of content with reasoning in front, where that may still come.

    The reasoning has none of the `barred` markers, which would begin a call in the middle of it,
    and `most` tokens at most.
    """
    opened, close = map(written.token, parser.markers)
    plain = (pattern(re.escape(one)) for one in barred if not written.is_token(one))
    without = "".join(f" & ~/(?s:.*){one}(?s:.*)/" for one in plain)
    if close:
        bound = "" if most is None else f"[max_tokens={most}]"
        thought = f"thought: {'thinking' if most != 0 else ''} {close} {_GAP}\n"
        thought += f"thinking{bound}: THOUGHT\nTHOUGHT: {ANYTHING}{without}\n"
    else:
        thought = f"thought: thought_text {_GAP}\n"
        thought += f"thought_text[lazy]: {up_to(re.escape(parser.markers[1]))}{without}\n"
    lead = "thought" if parser.reasoning else f"(/\\n?/ {opened} thought)?"
    if parser.reasoning and parser.may_open and opened:
        lead = f"(/\\n?/ {opened})? thought"
    return Rules(f"{lead} ({content.expression})", thought + content.rules)


def _harmony(wanted: Wanted, written: Format) -> Rules:
    """Return the language of messages in channels, of which the last is what is asked for."""
    tools, parser = wanted.tools, written.parser
    if parser is not None and not parser.may_reason:  # within the last message
        return _BODY if wanted.content is not None else Rules(ANYTHING)
    endings, rules = [], ""
    if tools is not None:
        called = calls(written.tools or "", tools, written.token)
        endings.append("call")
        rules += called.rules
    if tools is None or not tools.required:
        content = _BODY if wanted.content is not None else Rules(ANYTHING)
        endings.append("answered")
        rules += f'answered: <|channel|> "final" <|message|> ({content.expression})\n'
    rules += (
        f'thought: <|channel|> ("analysis" | "commentary") <|message|> thought_text <|end|> '
        f'<|start|> "assistant"\nthought_text: {ANYTHING}\n'
    )
    return Rules(f"thought* ({' | '.join(endings)})", rules)
