"""Generations: from a prepared request to the sequences that serve it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from surestep_common.request_params import sibling_seed
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.api_keys import Caller, Tenant
from surestep_gateway.context import Gateway
from surestep_gateway.generation.sequence import TokenUsage, emitted_before, wants_drafted
from surestep_gateway.observability.metrics import ModelMetrics, SequenceTimer
from surestep_gateway.parsers import OutputParser
from surestep_gateway.request.output_format import ChatOutput
from surestep_gateway.request.prepared import PreparedRequest, Prompt, max_tokens
from surestep_gateway.request.protocol import GenerationBody
from surestep_gateway.schedulers.journal import Journal, ResumableStream, Timeouts
from surestep_gateway.schedulers.pool import Siblings

from .detokenize import Detokenizer, RepetitionDetector, StopScanner, TextAssembler
from .schema_check import Checks, Promised, SchemaCheck, Violations, Written, violations
from .sequence import OutputSequence

_BATCH = 16  # sequences made in one iteration of the event loop
_MAX_OPEN_TOKENS = 1 << 22  # of the prompts of one request that are on their way at once


class Origin(NamedTuple):
    """The source of a request: its id, time of arrival and caller."""

    request_id: str
    arrived: float  # on the clock of time.perf_counter
    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A generation request that has passed every check, ready to run."""

    id: str
    model: str
    created: int  # seconds since 1970
    seed: int
    origin: Origin
    deadline: float  # on the event loop's clock
    body: GenerationBody
    prompts: Sequence[Prompt]
    role: str  # of a chat's answer
    sequences: Sequence[OutputSequence]  # index = prompt * n + sibling
    usage: TokenUsage
    max_open: int  # sequences the scheduler can run at once
    requests: ModelMetrics
    shows_weights: bool  # the answer says which version of the weights it is from

    @property
    def weight_headers(self) -> dict[str, str]:
        """Header that tells which weights the newest tokens are from, once there are some."""
        known = (one.journal.weight_version for one in self.sequences if self.shows_weights)
        version = next(filter(None, known), "")
        return {"x-weight-version": version} if version else {}

    def weights_of(self, sequence: OutputSequence) -> dict[str, Any]:
        """Return what the last choice of a sequence tells of its weights."""
        versions = sequence.journal.weight_versions
        if not (self.shows_weights and versions):
            return {}
        shown: dict[str, Any] = {"weight_version": sequence.journal.weight_version}
        if len(versions) > 1:  # they changed under way
            shown["weight_versions"] = [
                {"weight_version": version, "first_token": first} for first, version in versions
            ]
        return shown

    def prompt_of(self, sequence: OutputSequence) -> Prompt:
        """Return the prompt of a sequence."""
        return self.prompts[sequence.index // (self.body.n or 1)]

    def count_choices(self) -> None:
        """Record in the metrics the choices per prompt and the length of the longest."""
        n = self.body.n or 1
        for first in range(0, len(self.sequences), n):
            longest = max(one.num_tokens for one in self.sequences[first : first + n])
            self.requests.choices.observe(n)
            self.requests.most_tokens.observe(longest)


async def chat_generation(
    gateway: Gateway,
    prepared: PreparedRequest,
    origin: Origin,
    deadline: float,
    name: str | None = None,
) -> Generation:
    """Build the generation of a chat, under the id that its API gives it. Raise SurestepError."""
    new_parser = ChatOutput(gateway.settings, prepared).parser
    name = name or f"chatcmpl-{origin.request_id}"
    return await _generation(gateway, prepared, name, origin, deadline, new_parser)


async def completion_generation(
    gateway: Gateway, prepared: PreparedRequest, origin: Origin, deadline: float
) -> Generation:
    """Build the generation of a completion. Raise SurestepError."""
    name = f"cmpl-{origin.request_id}"
    return await _generation(gateway, prepared, name, origin, deadline, OutputParser)


async def _generation(
    gateway: Gateway,
    prepared: PreparedRequest,
    generation_id: str,
    origin: Origin,
    deadline: float,
    new_parser: Callable[[], OutputParser],
) -> Generation:
    body, prompts, n = prepared.body, prepared.prompts, prepared.body.n or 1
    origin.caller.check_priority(body.priority)
    builder = _SequenceBuilder(
        gateway=gateway,
        body=body,
        # Clients may repeat an id of theirs; the scheduler's must be unique among open requests.
        call_id=f"{generation_id}-{secrets.token_hex(4)}",
        sampling=prepared.sampling,
        checks=_checks(gateway, prepared.promised, origin),
        seed=gateway.seeds.getrandbits(64) if body.seed is None else body.seed,
        origin=origin,
        tenant=origin.caller.tenant(body.user or body.safety_identifier),
        new_parser=new_parser,
        deadline=deadline,
        usage=TokenUsage(sum(len(prompt.token_ids) for prompt in prompts)),
        siblings=Siblings(),
    )
    sequences = []
    for index in range(len(prompts) * n):
        sequences.append(builder.build(index, prompts[index // n].token_ids))
        if index % _BATCH == _BATCH - 1:
            await asyncio.sleep(0)  # others have a turn
    if emitted := emitted_before(builder.body):
        await sequences[0].go_on_behind(emitted)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return Generation(
        id=generation_id,
        model=body.model or gateway.name,
        created=int(time.time()),
        seed=builder.seed,
        origin=origin,
        deadline=deadline,
        body=body,
        prompts=prompts,
        role=prepared.role,
        sequences=sequences,
        usage=builder.usage,
        max_open=most_open(gateway.pool.info, longest),
        requests=gateway.requests,
        shows_weights=gateway.settings.enable_weight_updates,
    )


def _checks(gateway: Gateway, promised: Promised, origin: Origin) -> Checks | None:
    """Return the checks of a request; None where its grammar promises no less than its schema."""

    async def ask(promised: Promised, written: Sequence[Written]) -> Violations:
        return await violations(gateway.text, promised, written, origin.caller.name)

    return Checks(promised, ask) if promised else None


def most_open(info: SchedulerInfo, longest: int) -> int:
    """Return how many sequences of one request may be at the schedulers at once.

    `longest` is the length of its longest prompt in tokens.
    """
    return max(1, min(info.max_num_seqs, _MAX_OPEN_TOKENS // longest))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceBuilder:
    gateway: Gateway
    body: GenerationBody
    call_id: str
    sampling: SamplingParams  # without seed
    checks: Checks | None
    seed: int
    origin: Origin
    tenant: Tenant
    new_parser: Callable[[], OutputParser]
    deadline: float  # of the whole request, on the event loop's clock
    usage: TokenUsage
    siblings: Siblings

    def build(self, index: int, prompt_ids: Sequence[int]) -> OutputSequence:
        journal, pool = self._journal(index, prompt_ids), self.gateway.pool
        timeouts = Timeouts.of(self.gateway.settings)
        source = ResumableStream(pool, journal, timeouts, self.deadline, self.siblings)
        timer = SequenceTimer(self.gateway.requests, self.origin.arrived)
        eos_ids = self.gateway.pool.info.eos_token_ids
        return OutputSequence(
            index,
            journal,
            source,
            self._assembler(prompt_ids),
            eos_ids,
            timer,
            self.usage,
            counts_prompt=index % (self.body.n or 1) == 0,
            prompt_only=self.body.max_tokens == 0,
            check=SchemaCheck(self.checks) if self.checks is not None else None,
        )

    def _journal(self, index: int, prompt_ids: Sequence[int]) -> Journal:
        body = self.body
        return Journal(
            request_id=f"{self.call_id}-{index}",
            prompt_ids=prompt_ids,
            max_tokens=self._max_tokens(len(prompt_ids)),
            sampling=self.sampling,
            ignore_eos=bool(body.ignore_eos),
            seed=sibling_seed(self.seed, index % (body.n or 1)),
            tenant=self.tenant,
            session=self.origin.caller.session,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            adapter=self.gateway.settings.adapter_named(body.model),
            num_draft_tokens=body.speculative.num_tokens if body.speculative else None,
            want_drafted=wants_drafted(body),
            emitted_ids=[*emitted_before(body)],
        )

    def _max_tokens(self, prompt_len: int) -> int | None:
        asked = max_tokens(self.body, prompt_len, self.gateway.pool.info)
        return None if asked is None else max(1, asked)  # a prompt alone is scored by a step, too

    def _assembler(self, prompt_ids: Sequence[int]) -> TextAssembler:
        include_stop = bool(self.body.include_stop_str_in_output)
        parser, id_of = self.new_parser(), self.gateway.tokenizer.id
        return TextAssembler(
            detokenizer(self.gateway, self.body, prompt_ids, shown=parser.markers),
            StopScanner(stop_strings(self.body), include_stop=include_stop),
            parser,
            min_tokens=self.sampling.min_tokens,
            include_stop=include_stop,
            structure={id_: mark for mark in parser.structure if (id_ := id_of(mark)) is not None},
            repetition=self._repetition(),
        )

    def _repetition(self) -> RepetitionDetector | None:
        asked = self.body.repetition_detection
        if asked is None or not asked.max_pattern_size:
            return None
        sizes = asked.min_pattern_size, asked.max_pattern_size
        return RepetitionDetector(*sizes, asked.min_count, min_tokens=self.sampling.min_tokens)


def detokenizer(
    gateway: Gateway,
    body: GenerationBody,
    prompt_ids: Sequence[int],
    *,
    shown: Sequence[str] = (),
) -> Detokenizer:
    """Return a new detokenizer behind a prompt; the special tokens `shown` are never skipped."""
    skip = body.skip_special_tokens is not False
    return Detokenizer(
        gateway.tokenizer, skip_special_tokens=skip, shown=shown, prompt_ids=prompt_ids
    )


def stop_strings(body: GenerationBody) -> list[str]:
    """Return the stop strings of a request; a single empty one means none."""
    if isinstance(body.stop, str):
        return [body.stop] if body.stop else []
    return body.stop or []
