"""Sends the same requests to a server in every way and compares the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp
from surestep_common.errors import InvalidRequest, SurestepError

from surestep_cli.api.draft_stats import DraftStats, draft_stats
from surestep_cli.api.metrics import Metrics
from surestep_cli.api.responses import model_card

from .answers import Answer, ask, get, get_text
from .cases import ALONE, TOGETHER, Case, CaseResult, Sampling, judge, options_of
from .fault_injection import FaultInjection, LocalWorkers
from .gaps import explain
from .prompts import VerifyPrompt
from .report import FaultResult

_WARM_UP_TOKENS = 2
_WARM_UP_SALT = "warm-up"  # the reference shall not find its prompt computed
_MOST_EXPLAINED = 5  # differences of a case

Tell = Callable[[str, int], None]  # what is done now, and how many answers have come


class CaseResults(NamedTuple):
    """The results of all cases."""

    references: dict[Sampling, list[Answer]]
    results: list[CaseResult]
    faults: list[FaultResult]
    drafts: DraftStats


class Verification:
    """Verifies one server with at most `at_once` concurrent requests.

    `speculation`: whether there is any to compare with none.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prompts: Sequence[VerifyPrompt],
        *,
        temperature: float,
        speculation: bool,
        at_once: int,
        tell: Tell,
    ) -> None:
        self._session = session
        self._prompts = prompts
        self._temperature = temperature
        self._modes = (False, True) if speculation else (False,)
        self._gate = asyncio.Semaphore(at_once)
        self._tell = tell
        self._references: dict[Sampling, list[Answer]] = {}

    def num_answers(self, num_faults: int) -> int:
        """Return the number of answers that will be requested."""
        return len(self._prompts) * len(Sampling) * len(self._modes) * (2 + num_faults)

    async def run(self, faults: Sequence[str], victims: LocalWorkers | None) -> CaseResults:
        """Run all cases. Raise SurestepError when there is no reference to compare with."""
        await self._warm_up()
        before = await self.drafts()
        results = [r for sampling in Sampling for r in await self._alone(sampling)]
        for sampling in Sampling:
            results += [await self._together(Case(sampling, TOGETHER, on)) for on in self._modes]
        struck = []
        if victims is not None:
            for name in faults:
                fault, hurt = await self._hurt(name, victims)
                struck.append(fault)
                results += hurt
        drafts = (await self.drafts()).since(before)
        await self._explain(results)
        return CaseResults(self._references, results, struck, drafts)

    async def drafts(self) -> DraftStats:
        """Return the statistics so far; zeros where the server has no metrics."""
        try:
            return draft_stats(Metrics(await get_text(self._session, "metrics")))
        except SurestepError:
            return DraftStats()

    async def _warm_up(self) -> None:
        """Run the slow first steps of a server and find prompts that it refuses."""
        self._tell("asking for the first time", 0)
        for index in range(len(self._prompts)):
            short: dict[str, Any] = {"max_tokens": _WARM_UP_TOKENS, "max_completion_tokens": None}
            short |= {"min_tokens": 0, "cache_salt": _WARM_UP_SALT}
            options = self._options(index, Sampling.GREEDY, speculation=False) | short
            answer = await ask(self._session, self._prompts[index], options)
            if answer.failure is not None:
                name = self._prompts[index].name
                raise InvalidRequest(f"prompt {name!r}: {answer.failure}")

    async def _alone(self, sampling: Sampling) -> list[CaseResult]:
        """Run one prompt after the other, with and without in turn, as a machine's speed drifts."""
        self._tell(f"{sampling}, alone", 0)
        answers: dict[bool, list[Answer]] = {mode: [] for mode in self._modes}
        for index in range(len(self._prompts)):
            for mode in self._modes:
                answers[mode].append(await self._ask(index, sampling, speculation=mode))
        self._references[sampling] = answers[False]
        if lost := [answer.failure for answer in answers[False] if answer.failure is not None]:
            raise InvalidRequest(f"nothing to compare with, the reference failed: {lost[0]}")
        return [self._judge(Case(sampling, ALONE, mode), answers[mode]) for mode in self._modes]

    async def _together(self, case: Case) -> CaseResult:
        drafts = "with" if case.speculation else "without"
        self._tell(f"{case.sampling}, together, {drafts} speculation", 0)
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(self._ask(index, case.sampling, speculation=case.speculation))
                for index in range(len(self._prompts))
            ]
        return self._judge(case, [task.result() for task in asked])

    async def _hurt(self, name: str, victims: LocalWorkers) -> tuple[FaultResult, list[CaseResult]]:
        """Run every prompt in every way at once, with a fault in the middle."""
        self._tell(f"a worker is {name}", 0)
        company = f"worker {name}"
        cases = [Case(s, company, mode) for s in Sampling for mode in self._modes]
        expected = len(self._modes) * sum(
            answer.num_tokens for answers in self._references.values() for answer in answers
        )
        disaster = FaultInjection(name, victims, expected)
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(disaster.wait_and_strike())
            answers = await self._in_every_way(cases, disaster)
            disaster.streams_ended()
            fault = await watcher
        return fault, [self._judge(case, answers[i :: len(cases)]) for i, case in enumerate(cases)]

    async def _in_every_way(self, cases: Sequence[Case], disaster: FaultInjection) -> list[Answer]:
        """Return the answers by prompt, then by case."""
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(
                    self._ask(
                        *(index, case.sampling),
                        speculation=case.speculation,
                        heard=disaster.listener(self._references[case.sampling][index]),
                    )
                )
                for index in range(len(self._prompts))
                for case in cases
            ]
        return [task.result() for task in asked]

    def _options(self, index: int, sampling: Sampling, *, speculation: bool) -> dict[str, Any]:
        return options_of(
            self._prompts[index],
            index,
            sampling,
            speculation=speculation,
            temperature=self._temperature,
        )

    async def _ask(
        self,
        index: int,
        sampling: Sampling,
        *,
        speculation: bool,
        heard: Callable[[int], None] = lambda tokens: None,
    ) -> Answer:
        options = self._options(index, sampling, speculation=speculation)
        async with self._gate:
            answer = await ask(self._session, self._prompts[index], options, heard)
        self._tell("", 1)
        return answer

    def _judge(self, case: Case, answers: Sequence[Answer]) -> CaseResult:
        return judge(case, self._prompts, self._references[case.sampling], answers)

    async def _explain(self, results: Sequence[CaseResult]) -> None:
        for result in results:
            for index, difference in result.differences[:_MOST_EXPLAINED]:
                self._tell("looking at what differs", 0)
                sampling = result.case.sampling
                options = self._options(index, sampling, speculation=False)
                reference = self._references[sampling][index]
                await explain(self._session, self._prompts[index], options, reference, difference)


class About(NamedTuple):
    """The server's facts about itself."""

    model: str
    temperature: float | None  # default of requests, None if that is 0 or unknown
    is_surestep: bool


async def about(session: aiohttp.ClientSession, name: str | None) -> About:
    """Describe the model called `name`, or the first one. Raise Unavailable and InvalidRequest."""
    card = model_card(await get(session, "v1/models"), name)
    defaults = card.get("default_sampling_params") or {}
    try:
        ours = "surestep:steps_total" in Metrics(await get_text(session, "metrics"))
    except SurestepError:
        ours = False
    return About(card["id"], defaults.get("temperature") or None, ours)


def prepared(prompts: Sequence[VerifyPrompt], model: str, max_tokens: int) -> list[VerifyPrompt]:
    """Return the prompts for a model, each with a maximum length."""
    limits = ("max_tokens", "max_completion_tokens")
    return [
        replace(
            prompt,
            body={
                **({} if any(prompt.body.get(n) for n in limits) else {"max_tokens": max_tokens}),
                **prompt.body,
                "model": model,
            },
        )
        for prompt in prompts
    ]
