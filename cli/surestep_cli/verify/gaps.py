"""The cause of a difference: the gap between the two best tokens there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from .answers import Answer, ask
from .cases import Difference, DifferencePosition
from .prompts import VerifyPrompt

_NEAR_TIE = 0.07  # one unit in the last place of a bfloat16 logit around 10
_ALTERNATIVES = 2


async def explain(
    session: aiohttp.ClientSession,
    prompt: VerifyPrompt,
    options: Mapping[str, Any],
    reference: Answer,
    difference: Difference,
) -> None:
    """Repeat the reference's request with log-probabilities and record the gap and its meaning."""
    place = difference.place
    if place is None:
        difference.meaning = "the tokens are equal, the reason to end is not"
        return
    difference.what = await _in_words(session, place)
    again = await ask(session, prompt, {**options, **_wanted(prompt, place)})
    choice = again.choices[place.choice]
    upto = place.position + 1
    known = reference.choices[place.choice].token_ids[:upto]
    if again.failure is not None:
        difference.meaning = f"the server does not tell the gap: {again.failure}"
    elif choice.token_ids[:upto] != known:
        difference.meaning = (
            "asked once more, alone and without speculation, the server does not repeat its own "
            "answer: nothing that it says can be compared"
        )
    elif len(choice.alternatives) > place.position:
        best = sorted(choice.alternatives[place.position], key=lambda one: -one[1])
        difference.best = best[:_ALTERNATIVES]
        difference.gap, difference.meaning = _judged(best, greedy=options["temperature"] == 0)


def _wanted(prompt: VerifyPrompt, place: DifferencePosition) -> dict[str, Any]:
    """Return the options for log-probabilities up to the position of the difference."""
    tokens = place.position + 1
    limits: dict[str, Any] = {"max_tokens": tokens}
    if prompt.body.get("max_completion_tokens"):
        limits = {"max_completion_tokens": tokens}
    if prompt.body.get("min_tokens"):
        limits["min_tokens"] = min(prompt.body["min_tokens"], tokens)
    if prompt.is_chat:
        return {**limits, "logprobs": True, "top_logprobs": _ALTERNATIVES}
    return {**limits, "logprobs": _ALTERNATIVES}


def _judged(best: Sequence[tuple[str, float]], *, greedy: bool) -> tuple[float | None, str]:
    """Return the gap and its meaning."""
    if len(best) < _ALTERNATIVES:
        return None, "there was one candidate alone"
    gap = best[0][1] - best[1][1]
    if not greedy:
        return gap, (
            "among sampled tokens the noise of the seed decides: equal seeds and positions must "
            "draw equal noise, and a token less likely than another may be right"
        )
    if gap < _NEAR_TIE:
        return gap, (
            "a near tie, which the last bits of the logits decide: the arithmetic of a row depends "
            "on what runs beside it"
        )
    return gap, (
        "no rounding explains that gap: another context, another position or another state was "
        "computed, or a draft was accepted that should not have been"
    )


async def _in_words(session: aiohttp.ClientSession, place: DifferencePosition) -> str:
    expected, got = [await _spelled(session, each) for each in (place.expected, place.got)]
    return f"{expected} became {got}"


async def _spelled(session: aiohttp.ClientSession, token: int | None) -> str:
    """Return a token with its text, if the server can detokenise it."""
    if token is None:
        return "the end"
    try:
        async with session.post("detokenize", json={"tokens": [token]}) as response:
            text = (await response.json())["prompt"] if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
        text = None
    return f"token {token}" if text is None else f"{text!r} ({token})"
