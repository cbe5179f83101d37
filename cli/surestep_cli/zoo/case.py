"""A case: a published failure, what is asked, what a right server answers, and the verdict."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import NamedTuple

from .target import Answer, Body, Broken, Refused, Subject

NEAR_TIE = 0.07  # nats: one unit in the last place of a bfloat16 logit around 10
_PACE = 100.0  # tokens a second of a case's `seconds`
_SLACK = 4.0  # times as long as expected that no hang is
_PROBE = "blue"


class Verdict(StrEnum):
    """Outcome of a case."""

    PASS = "pass"  # noqa: S105  # no password
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"  # what it needs is not there, or was refused by name
    CANNOT_TELL = "cannot tell"


class Finding(NamedTuple):
    """Verdict, why, and the smallest request that shows a failure."""

    verdict: Verdict
    why: str
    request: Body | None = None


Look = Callable[[Subject], Awaitable[Finding]]


class Case(NamedTuple):
    """A failure that was published, and how one looks for it."""

    name: str
    reports: str  # V, S, L: issues of vLLM, SGLang, llama.cpp; others by their name
    does: str  # in plain words
    right: str  # what a right server answers
    needs: tuple[str, ...]  # of the server, beside completions of a text
    seconds: int  # that it takes, about, at _PACE
    look: Look


def case(
    name: str, reports: str, right: str, *, seconds: int, needs: str = ""
) -> Callable[[Look], Case]:
    """Make a case of a function whose docstring says what it does; `needs` stand between commas."""

    def made(look: Look) -> Case:
        does = " ".join((look.__doc__ or "").split())
        needed = tuple(filter(None, needs.split(", ")))
        return Case(name, reports, does, right, needed, seconds, look)

    return made


class CaseResult(NamedTuple):
    """Finding of a case, and how long it took."""

    case: Case
    finding: Finding
    took_s: float


def passed(why: str) -> Finding:
    return Finding(Verdict.PASS, why)


def failed(why: str, request: Body | None = None) -> Finding:
    return Finding(Verdict.FAIL, why, request)


def inapplicable(why: str) -> Finding:
    return Finding(Verdict.NOT_APPLICABLE, why)


def unclear(why: str) -> Finding:
    return Finding(Verdict.CANNOT_TELL, why)


async def run(case: Case, subject: Subject, patience_s: float) -> CaseResult:
    """Look for the failure; a server that hangs or breaks meanwhile fails, a slow one does not."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            finding = await case.look(subject)
    except* Refused as refused:  # alone, or of one of several requests at once
        finding = inapplicable(f"refused: {refused.exceptions[0]}")
    except* Broken as broken:
        finding = failed(str(broken.exceptions[0]))
    except* TimeoutError:
        finding = _unfinished(case, subject.pace, patience_s)
    return CaseResult(case, finding, time.monotonic() - began)


def _unfinished(case: Case, pace: float, patience_s: float) -> Finding:
    """Say whether that is a hang, by what the case takes at the server's pace."""
    told = f"no end within {patience_s:.0f} s"
    expected = case.seconds * _PACE / pace
    if expected * _SLACK > patience_s:
        slow = f"{told} at {pace:.1f} tokens a second: --patience-s {expected * _SLACK:.0f}"
        return unclear(slow)
    return failed(told)


async def compared(
    subject: Subject, pairs: list[tuple[Body, Answer, Answer]], what: str
) -> Finding:
    """Return a pass if both answers to each request are equal, with `what` differs if not."""
    for body, one, other in pairs:
        if one.key != other.key:
            return await _difference(subject, body, one, other, what)
    if not any(one.ids or one.text or one.calls for _, one, _ in pairs):
        return unclear("every answer is empty")
    return passed(f"{len(pairs)} answers are equal")


async def _difference(
    subject: Subject, body: Body, one: Answer, other: Answer, what: str
) -> Finding:
    """Say of two answers whether rounding explains that they are not equal."""
    if not subject.repeats:
        return unclear("the server does not repeat its own greedy answer")
    at = _first_difference(one, other)
    if at is not None and body.get("temperature", 0) == 0:
        what += f" at token {at + 1}"
        gap = await _gap(subject, body, at)
        if gap is not None and gap < NEAR_TIE:
            return unclear(f"{what}, a near tie ({gap:.3f} nats): rounding")
    return failed(f"{what}: {_shown(one)} and {_shown(other)}", body)


def _first_difference(one: Answer, other: Answer) -> int | None:
    pairs = enumerate(zip(one.ids, other.ids, strict=False))
    return next((at for at, (a, b) in pairs if a != b), None)


def _shown(answer: Answer) -> str:
    return f"{answer.text[-40:]!r} ({answer.finish})"


async def _gap(subject: Subject, body: Body, at: int) -> float | None:
    """Return by how much the two likeliest tokens differ there, None where it is not told."""
    chat = "messages" in body
    wanted: Body = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    try:
        answer = await subject.target.ask_one(body | wanted | {"max_tokens": at + 1})
    except (Refused, Broken):
        return None
    if len(answer.logprobs) != at + 1 or len(answer.logprobs[at].best) < 2:
        return None
    first, second = sorted(answer.logprobs[at].best.values())[-1:-3:-1]
    return first - second


def is_json(text: str) -> bool:
    """Return whether a text is a JSON value."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _ways(text: str) -> list[Body]:
    """Return the parameters of servers by which an answer is this text."""
    return [
        {"structured_outputs": {"choice": [text]}},  # vLLM, Surestep
        {"guided_choice": [text]},  # older vLLM
        {"ebnf": f"root ::= {json.dumps(text, ensure_ascii=False)}"},  # SGLang
        {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}"},  # llama.cpp
    ]


async def forced(subject: Subject, text: str) -> Body:
    """Return a chat that is answered with this text. Raise Refused where none can be forced."""
    for number, way in enumerate(_ways(_PROBE)):
        try:
            answer = await subject.target.ask_one(_chat(_PROBE) | way)
        except (Refused, Broken):
            continue
        if answer.text == _PROBE:
            return _chat(text) | _ways(text)[number]
    raise Refused("no text can be forced: no structured_outputs, guided_choice, ebnf or grammar")


def _chat(text: str) -> Body:
    return {"messages": [{"role": "user", "content": f"Say {text}"}], "max_tokens": 600}
