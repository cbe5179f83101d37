"""Check that tokens are the model's: by the server's own log-probabilities, and by a reference."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import SurestepError, Unavailable

from surestep_cli.zoo.case import NEAR_TIE

from .answers import Answer, ask
from .cases import Difference, DifferencePosition
from .prompts import BANNED, GRAMMAR, LIKELIEST, VerifyPrompt
from .reference import TRANSFORMERS, Reader, ReadToken, reader_of, reading, rows_of
from .report import Check, Verdict

_MOST_REGRET = 0.5  # nats between the likeliest token and the one that was taken; rounding is less
_MEAN_REGRET = 0.05
_MOST_DRIFT = 0.5  # nats between the log-probability of a token when generated and when read
_MOST_READ = 8  # answers that are fed back
_EXTRA = 1e-3  # that probabilities may have above 1
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
    if gap < NEAR_TIE:
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


class Answered(NamedTuple):
    """A prompt and its answer."""

    prompt: VerifyPrompt
    answer: Answer

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the only choice."""
        return self.answer.choices[0].token_ids


class Oracle:
    """Looks at tokens that no parameter has shaped, and at the form of the other answers."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        model: str,
        greedy: Sequence[Answered],
        sampled: Sequence[Answered],
    ) -> None:
        self._session = session
        self._model = model
        self._greedy = greedy
        self._answered = [*greedy, *sampled]
        plain = [each for each in greedy if each.prompt.is_plain and each.answer.prompt_ids]
        # With min_p 1 the likeliest token is the only one to draw.
        narrow = [each for each in sampled if each.prompt.name == LIKELIEST]
        self._plain = plain[:_MOST_READ] + narrow

    async def checks(self, reference: str | None) -> list[Check]:
        """Return every check that can be made. Raise SurestepError for a useless reference."""
        found = [*_obeyed(self._answered), *_distinct(self._greedy)]
        if reference is None:
            found.append(await self._reread())
            return found
        with contextlib.suppress(Unavailable):
            found.append(await self._reread())
        async with reader_of(reference, self._session, self._model) as read:
            name = "reference " + (reference if reference == TRANSFORMERS else reference[:60])
            found.append(
                await self._read_by(read, name) if read else await self._by_file(reference)
            )
        return found

    async def _reread(self) -> Check:
        """Feed greedy answers back as prompts: the server has to rank first what it had chosen,
        and not what it had answered to another prompt.
        """
        name = "answers fed back as prompts"
        read = reading(self._session, self._model)
        try:
            check = await self._read_by(read, name)
            if check.verdict is Verdict.EQUAL:
                problem = await self._confused(read) or await self._inconsistent(read)
                if problem:
                    return Check(name, Verdict.DIFFERENT, problem)
        except SurestepError as error:
            return Check(name, Verdict.NOT_SHOWN, f"{error}; --reference would do, too")
        return check

    async def _read_by(self, read: Reader, name: str) -> Check:
        if not self._plain:
            return Check(name, Verdict.NOT_SHOWN, "no greedy answer without parameters")
        tokens: list[ReadToken] = []
        for each in self._plain:
            tokens += await read(each.answer.prompt_ids, each.token_ids)
        problem = _unlikely(tokens)
        if problem:
            return Check(name, Verdict.DIFFERENT, problem)
        first = sum(token.regret <= 0 for token in tokens)
        detail = f"{name}: {first} of {len(tokens)} tokens are the likeliest, "
        worst = max((token.regret for token in tokens), default=0.0)
        return Check(
            name, Verdict.EQUAL, detail + f"the others miss it by {worst:.3f} nats at most"
        )

    async def _confused(self, read: Reader) -> str | None:
        """Return what is wrong if an answer to another prompt seems as likely."""
        for one, other in itertools.pairwise(self._plain):
            if one.token_ids == other.token_ids:
                continue
            if not _unlikely(await read(one.answer.prompt_ids, other.token_ids)):
                return (
                    f"the answer to {other.prompt.name!r} is likeliest behind another prompt, too"
                )
            return None
        return None

    async def _inconsistent(self, read: Reader) -> str | None:
        """Return what is wrong with the log-probabilities of an answer."""
        for prompt, answer in self._plain[:2]:
            again = await ask(self._session, prompt, {"temperature": 0, "logprobs": _ALTERNATIVES})
            rows = again.choices[0].alternatives
            if again.failure is not None or len(rows) != len(answer.choices[0].token_ids):
                return f"log-probabilities of {prompt.name!r}: {again.failure or 'not one a token'}"
            for row, token in zip(
                rows, await read(answer.prompt_ids, answer.choices[0].token_ids), strict=True
            ):
                best = max((logprob for _, logprob in row), default=-math.inf)
                total = sum(math.exp(logprob) for _, logprob in row)
                if total > 1 + _EXTRA:
                    return f"probabilities of {prompt.name!r} add up to {total:.2f}"
                if abs(best - token.logprob) > _MOST_DRIFT:
                    return (
                        f"a token of {prompt.name!r} has the log-probability {best:.3f} when "
                        f"generated and {token.logprob:.3f} when read"
                    )
        return None

    async def _by_file(self, path: str) -> Check:
        """Ask the prompts of a file, with and without speculation."""
        rows = rows_of(Path(path))
        wrong = []
        for prompt, expected in rows:
            for options in ({}, {"speculative": {"num_tokens": 0}}):
                body = {"temperature": 0, "model": self._model, "ignore_eos": True, **options}
                answer = await ask(self._session, prompt, {**body, "max_tokens": len(expected)})
                got = answer.choices[0].token_ids
                if answer.failure is not None or got != expected:
                    place = sum(
                        1
                        for _ in itertools.takewhile(
                            lambda p: p[0] == p[1], zip(expected, got, strict=False)
                        )
                    )
                    wrong.append(f"{prompt.name}: {answer.failure or f'token {place + 1} differs'}")
        name = f"reference {Path(path).name}"
        if wrong:
            return Check(name, Verdict.DIFFERENT, "; ".join(wrong[:3]))
        return Check(name, Verdict.EQUAL, f"{name}: {len(rows)} answers are equal")


def _unlikely(tokens: Sequence[ReadToken]) -> str | None:
    """Return what is wrong with tokens that were to be the likeliest ones."""
    regrets = [token.regret for token in tokens]
    if not regrets:
        return None
    mean = sum(regrets) / len(regrets)
    if max(regrets) <= _MOST_REGRET and mean <= _MEAN_REGRET:
        return None
    others = sum(regret > _MOST_REGRET for regret in regrets)
    return (
        f"{others} of {len(regrets)} greedy tokens are not what the model ranks first: another is "
        f"likelier by up to {max(regrets):.2f} nats, {mean:.2f} on average"
    )


def _distinct(answered: Sequence[Answered]) -> Iterator[Check]:
    """Different prompts have to give different answers."""
    said = {
        json.dumps(each.prompt.body.get("prompt")): tuple(each.token_ids)
        for each in answered
        if each.prompt.is_plain
    }
    if len(said) > 1 and min(map(len, said.values())) > 1:
        name, differing = "different prompts", len(set(said.values()))
        if differing == 1:
            yield Check(name, Verdict.DIFFERENT, f"all {len(said)} prompts have the same answer")
        else:
            detail = f"{len(said)} prompts have {differing} different answers"
            yield Check(name, Verdict.EQUAL, detail)


def _obeyed(answered: Sequence[Answered]) -> Iterator[Check]:
    """Parameters have to shape the answers."""
    broken, count = [], 0
    for prompt, answer in answered:
        choices = [answer.choices[i] for i in sorted(answer.choices)]
        body, said = prompt.body, [each.token_ids for each in choices]
        limit = body.get("max_tokens") or body.get("max_completion_tokens")
        ended = {each.finish_reason for each in choices}
        rules = {
            "n": len(said) == (body.get("n") or 1),
            "max_tokens": not limit or max(map(len, said), default=0) <= limit,
            "ignore_eos": not body.get("ignore_eos")
            or not body.keys().isdisjoint(("stop", "stop_token_ids"))
            or {len(each) for each in said} == {limit},
            "logit_bias": prompt.name != BANNED
            or not {str(token) for token in said[0]} & body["logit_bias"].keys(),
            "structured_outputs": "structured_outputs" not in body
            or body["structured_outputs"] != {"regex": GRAMMAR}
            or ended != {"stop"}
            or all(re.fullmatch(GRAMMAR, each.text) for each in choices),
            # One that is cut in its reasoning has no text either.
            "tool_choice": prompt.name != "a tool"
            or all(each.called or not each.text for each in choices),
        }
        count += sum(name in body for name in rules)
        broken += [f"{prompt.name} ({name})" for name, kept in rules.items() if not kept]
    if broken:
        yield Check("parameters", Verdict.DIFFERENT, f"not obeyed: {', '.join(broken)}")
    else:
        yield Check("parameters", Verdict.EQUAL, f"{count} parameters are obeyed")
