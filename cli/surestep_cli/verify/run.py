"""Sends the same requests to a server in every way and compares the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import InvalidRequest

from .answers import Answer, ask
from .cases import (
    ALONE,
    CROWD,
    LEAST_ROUNDS,
    LIMIT,
    NEWCOMERS,
    TOGETHER,
    Case,
    CaseResult,
    Sampling,
    judge,
    options_of,
)
from .counters import Counts, Meter
from .faults import COMPANIES, FaultInjection, LocalServer
from .oracle import Answered, Oracle, explain
from .prompts import BANNED, VerifyPrompt, ban, crowd, near_limit, prepared
from .report import Check, FaultResult
from .server import About

_WARM_UP_TOKENS = 2
_WARM_UP_SALT = "warm-up"  # the reference shall not find its prompt computed
_MOST_EXPLAINED = 5  # differences of a case
_CROWD_TOKENS, _QUICK_CROWD_TOKENS = 16, 12  # newcomers meet full slots, drafts or none
_FULL = 2  # tokens that each slot has had: all of them are taken
_CROWD_AT_ONCE = 64
_LONG = 2048  # tokens of a prompt that always is computed within seconds
_PROBE = 512  # tokens, from which the seconds for a longer prompt are estimated
_MOST_S = 60.0  # for one prompt

Tell = Callable[[str, int], None]  # what is done now, and how many answers have come


@dataclass(slots=True)
class PromptSet:
    """Prompts and their references."""

    prompts: list[VerifyPrompt]
    references: dict[Sampling, list[Answer]] = field(default_factory=dict)


class Findings(NamedTuple):
    """The results of all cases."""

    main: PromptSet
    results: list[CaseResult]
    faults: list[FaultResult]
    counts: Counts
    reference_windows: int
    checks: list[Check]
    skipped: dict[str, str]


class Plan(NamedTuple):
    """A list of what to run. `speculation`: whether there is any to compare with none."""

    temperature: float
    speculation: bool
    at_once: int
    most_open: int  # requests that the server takes, besides those of another client
    faults: Sequence[str]
    quick: bool
    reference: str | None
    has_keys: bool  # then the key, and not `user`, tells clients apart

    @property
    def rounds(self) -> int:
        """Rounds of the greedy cases, with and without speculation in turns."""
        return 1 if self.quick else LEAST_ROUNDS


class Verification:
    """Verifies one server with at most `at_once` concurrent requests."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prompts: Sequence[VerifyPrompt],
        plan: Plan,
        known: About,
        tell: Tell,
    ) -> None:
        self._session = session
        self._plan = plan
        self._known = known
        self._tell = tell
        self._modes = (False, True) if plan.speculation else (False,)
        self._main = PromptSet(list(prompts))
        self._sets = {LIMIT: PromptSet([]), CROWD: PromptSet([])}  # by company, if not the main one
        self._gate = asyncio.Semaphore(plan.at_once)
        self._meter = Meter(session)
        self._results: list[CaseResult] = []
        self._skipped: dict[str, str] = {}
        self._text_ids: list[int] = []  # some tokens that the server has used

    @property
    def num_answers(self) -> int:
        """Answers of the cases about the main prompts, as far as it is known."""
        times = 2 * (self._plan.rounds + 1) + len(Sampling) * len(self._plan.faults)
        return len(self._main.prompts) * len(self._modes) * times

    async def run(self, server: LocalServer | None) -> Findings:
        """Run all cases. Raise SurestepError when there is no reference to compare with."""
        await self._warm_up()
        await self._meter.lap()
        for sampling in Sampling:
            await self._refer(self._main, sampling, f"{sampling}, the reference")
        windows = (await self._meter.lap()).drafts.windows
        await self._alone()
        await self._together()
        await self._at_limit()
        await self._crowded()
        struck: list[FaultResult] = []
        if server is not None:
            struck = [await self._hurt(name, server) for name in self._plan.faults]
        await self._meter.lap()
        checks = await self._look()
        await self._explain()
        counts = self._meter.total
        return Findings(self._main, self._results, struck, counts, windows, checks, self._skipped)

    async def _warm_up(self) -> None:
        """Run the slow first steps of a server and find prompts that it refuses."""
        self._tell("asking for the first time", 0)
        accepted = []
        for index, prompt in enumerate(self._main.prompts):
            short: dict[str, Any] = {"max_tokens": _WARM_UP_TOKENS, "max_completion_tokens": None}
            short |= {"min_tokens": 0, "cache_salt": _WARM_UP_SALT}
            options = self._options(prompt, index, Sampling.GREEDY, False) | short
            answer = await ask(self._session, prompt, options)
            if answer.failure is None:
                first = answer.choices[0].token_ids
                self._text_ids += answer.prompt_ids + first
                accepted.append(ban(prompt, first) if prompt.name == BANNED else prompt)
            elif prompt.optional and answer.refused:
                self._skipped[prompt.name] = answer.failure
            else:
                raise InvalidRequest(f"prompt {prompt.name!r}: {answer.failure}")
        self._main.prompts = accepted

    async def _refer(self, asked: PromptSet, sampling: Sampling, told: str) -> None:
        """Ask every prompt alone and without speculation."""
        self._tell(told, 0)
        asked.references[sampling] = [
            await self._ask(prompt, index, sampling, speculation=False, counts=False)
            for index, prompt in enumerate(asked.prompts)
        ]
        _raise_lost(asked.references[sampling])

    async def _alone(self) -> None:
        """Run one prompt after the other, with and without in turns: a machine's speed drifts."""
        for sampling, rounds in self._rounds():
            self._tell(f"{sampling}, alone", 0)
            answers: dict[bool, list[list[Answer]]] = {mode: [] for mode in self._modes}
            for number in range(rounds):
                for mode in self._modes:
                    answers[mode].append([])
                for index, prompt in enumerate(self._main.prompts):
                    for mode in self._modes[:: -1 if number % 2 else 1]:
                        asked = self._ask(prompt, index, sampling, speculation=mode)
                        answers[mode][-1].append(await asked)
            windows = (await self._meter.lap()).drafts.windows
            for mode in self._modes:
                case = Case(sampling, ALONE, mode)
                self._judge(case, self._main, answers[mode], windows if mode else 0)

    async def _together(self) -> None:
        for sampling, rounds in self._rounds():
            answers: dict[bool, list[list[Answer]]] = {mode: [] for mode in self._modes}
            self._tell(f"{sampling}, together", 0)
            for number in range(rounds):
                for mode in self._modes[:: -1 if number % 2 else 1]:
                    answers[mode].append(
                        await self._at_once(self._main, sampling, speculation=mode)
                    )
            windows = (await self._meter.lap()).drafts.windows
            for mode in self._modes:
                case = Case(sampling, TOGETHER, mode)
                self._judge(case, self._main, answers[mode], windows if mode else 0)

    def _rounds(self) -> Iterable[tuple[Sampling, int]]:
        """Yield the rounds of each sampling; speed is measured with greedy answers."""
        return (Sampling.GREEDY, self._plan.rounds), (Sampling.SAMPLED, 1)

    async def _at_limit(self) -> None:
        """Ask prompts that run into max_model_len at different times: vllm-project/vllm#36917."""
        self._tell("prompts that run into max_model_len", 0)
        if problem := await self._too_long():
            self._skipped[LIMIT] = problem
            return
        asked = self._sets[LIMIT]
        made = near_limit(self._text_ids, self._known.max_model_len or 0)
        asked.prompts = prepared(made, self._known.model)
        # The others find most of it in the prefix cache.
        await ask(self._session, asked.prompts[0], {"max_tokens": 1, "temperature": 0})
        for mode in (False, *self._modes):
            answers = await self._at_once(asked, Sampling.GREEDY, speculation=mode)
            windows = (await self._meter.lap()).drafts.windows
            if Sampling.GREEDY not in asked.references:
                _raise_lost(answers)
                asked.references[Sampling.GREEDY] = answers
            else:
                self._judge(Case(Sampling.GREEDY, LIMIT, mode), asked, [answers], windows)

    async def _too_long(self) -> str | None:
        """Return why the prompts of that length cannot be asked for."""
        longest = self._known.max_model_len
        if longest is None:
            return "the server does not tell its max_model_len"
        if longest <= _LONG or not self._text_ids:
            return None
        (probe,) = prepared(near_limit(self._text_ids, _PROBE)[:1], self._known.model)
        began = time.monotonic()
        await ask(self._session, probe, {"max_tokens": 1, "cache_salt": _WARM_UP_SALT})
        # Attention makes a prompt dearer than its length says.
        seconds = (time.monotonic() - began) * longest / _PROBE * max(1, longest / _LONG / 2)
        if seconds <= _MOST_S:
            return None
        return f"a prompt of {longest} tokens would take {seconds:.0f} s: shorten --max-model-len"

    async def _crowded(self) -> None:
        """Ask 64 prompts of 8 samples each (#45100), and while they fill every slot the main
        prompts of another client, which take the places of some.
        """
        self._tell("64 prompts x 8 samples, without speculation", 0)
        tokens = _QUICK_CROWD_TOKENS if self._plan.quick else _CROWD_TOKENS
        asked = self._sets[CROWD]
        asked.prompts = prepared(crowd(tokens), self._known.model)
        gate = self._gate
        self._gate = asyncio.Semaphore(min(_CROWD_AT_ONCE, self._plan.most_open))
        alone = await self._at_once(asked, Sampling.SAMPLED, speculation=False)
        _raise_lost(alone)
        asked.references[Sampling.SAMPLED] = alone
        await self._meter.lap()
        mode = self._modes[-1]
        self._tell("64 prompts x 8 samples, and other clients", 0)
        full, left = asyncio.Event(), _FULL * self._known.num_slots

        def heard(tokens: int) -> None:
            nonlocal left
            left -= tokens
            if left <= 0:
                full.set()

        async with asyncio.TaskGroup() as tasks:
            asking = self._at_once(asked, Sampling.SAMPLED, speculation=mode, heard=heard)
            crowd_task = tasks.create_task(asking)
            crowd_task.add_done_callback(lambda _: full.set())
            await full.wait()
            others, windows = [await self._newcomers(mode)], 0
            # Slots may have been free just then.
            while not (lap := await self._meter.lap()).preemptions and not crowd_task.done():
                windows += lap.drafts.windows
                others.append(await self._newcomers(mode))
        windows += lap.drafts.windows + (await self._meter.lap()).drafts.windows
        self._gate = gate
        case = Case(Sampling.SAMPLED, CROWD, mode)
        self._judge(case, asked, [crowd_task.result()], windows)
        self._judge(Case(Sampling.SAMPLED, NEWCOMERS, mode), self._main, others)
        if not self._known.is_surestep:
            self._skipped[NEWCOMERS] = "a server of another kind does not count them as ours does"
        elif self._plan.has_keys:
            self._skipped[NEWCOMERS] = "with API keys this command is one client"

    async def _newcomers(self, mode: bool) -> list[Answer]:
        """Ask the main prompts as another client, past the gate."""
        sampled, user = Sampling.SAMPLED, {"user": "newcomer"}
        made = (
            ask(self._session, prompt, {**self._options(prompt, i, sampled, mode), **user})
            for i, prompt in enumerate(self._main.prompts)
        )
        return await asyncio.gather(*made)

    async def _hurt(self, name: str, server: LocalServer) -> FaultResult:
        """Run every prompt in every way at once, with a fault in the middle."""
        company = COMPANIES[name]
        self._tell(company, 0)
        cases = [Case(s, company, mode) for s in Sampling for mode in self._modes]
        expected = len(self._modes) * sum(
            answer.num_tokens for answers in self._main.references.values() for answer in answers
        )
        disaster = FaultInjection(name, server, expected)
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(disaster.wait_and_strike())
            answers = await self._in_every_way(cases, disaster)
            disaster.streams_ended()
            fault = await watcher
        windows = (await self._meter.lap()).drafts.windows
        for i, case in enumerate(cases):
            self._judge(
                case, self._main, [answers[i :: len(cases)]], windows if case.speculation else 0
            )
        return fault

    async def _in_every_way(self, cases: Sequence[Case], disaster: FaultInjection) -> list[Answer]:
        """Return the answers by prompt, then by case."""
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    self._ask(
                        prompt,
                        index,
                        case.sampling,
                        speculation=case.speculation,
                        heard=disaster.listener(self._main.references[case.sampling][index]),
                    )
                )
                for index, prompt in enumerate(self._main.prompts)
                for case in cases
            ]
        return [task.result() for task in asked]

    async def _at_once(
        self,
        asked: PromptSet,
        sampling: Sampling,
        *,
        speculation: bool,
        heard: Callable[[int], None] = lambda tokens: None,
    ) -> list[Answer]:
        counts = asked is self._main
        ask = partial(self._ask, speculation=speculation, heard=heard, counts=counts)
        async with asyncio.TaskGroup() as tasks:
            answers = [
                tasks.create_task(ask(prompt, index, sampling))
                for index, prompt in enumerate(asked.prompts)
            ]
        return [task.result() for task in answers]

    def _options(
        self, prompt: VerifyPrompt, index: int, sampling: Sampling, speculation: bool
    ) -> dict[str, Any]:
        temperature = self._plan.temperature
        return options_of(prompt, index, sampling, speculation=speculation, temperature=temperature)

    async def _ask(
        self,
        prompt: VerifyPrompt,
        index: int,
        sampling: Sampling,
        *,
        speculation: bool,
        heard: Callable[[int], None] = lambda tokens: None,
        counts: bool = True,
    ) -> Answer:
        options = self._options(prompt, index, sampling, speculation)
        async with self._gate:
            answer = await ask(self._session, prompt, options, heard)
        self._tell("", int(counts))
        return answer

    def _judge(
        self, case: Case, asked: PromptSet, rounds: Sequence[Sequence[Answer]], windows: int = 0
    ) -> None:
        references = asked.references[case.sampling]
        self._results.append(judge(case, asked.prompts, references, rounds, windows))

    async def _look(self) -> list[Check]:
        self._tell("looking at the tokens themselves", 0)
        prompts, found = self._main.prompts, self._main.references
        greedy, sampled = (
            [Answered(*pair) for pair in zip(prompts, found[s], strict=True)] for s in Sampling
        )
        oracle = Oracle(self._session, self._known.model, greedy, sampled)
        return await oracle.checks(self._plan.reference)

    async def _explain(self) -> None:
        for result in self._results:
            asked = self._sets.get(result.case.company, self._main)
            for index, difference in result.differences[:_MOST_EXPLAINED]:
                self._tell("looking at what differs", 0)
                sampling, prompt = result.case.sampling, asked.prompts[index]
                options = self._options(prompt, index, sampling, False)
                reference = asked.references[sampling][index]
                await explain(self._session, prompt, options, reference, difference)


def _raise_lost(answers: Sequence[Answer]) -> None:
    if lost := [answer.failure for answer in answers if answer.failure is not None]:
        raise InvalidRequest(f"nothing to compare with, the reference failed: {lost[0]}")
