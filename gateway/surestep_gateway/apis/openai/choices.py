"""Choices of chats and of completions, whole and in chunks.

Plain dicts on purpose: one of these is built for every delta of every stream.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from surestep_proto.sampling_pb2 import LogprobColumns

from surestep_gateway.apis.openai.logprobs import (
    CompletionLogprobs,
    TextOfClient,
    TextOfTokens,
    TokenSpeller,
    chat_logprobs,
    prompt_logprobs,
)
from surestep_gateway.context import Gateway
from surestep_gateway.generation.detokenize import Detokenizer
from surestep_gateway.generation.generation import Generation, detokenizer
from surestep_gateway.generation.schema_check import Violations, violations_shown
from surestep_gateway.generation.sequence import (
    Delta,
    OutputSequence,
    Position,
    emitted_before,
    position_slices,
    wants_drafted,
)
from surestep_gateway.http.bodies import GrowingLists, RawJson
from surestep_gateway.parsers import (
    Content,
    Event,
    Reasoning,
    ToolArguments,
    ToolCallStart,
    coalesce,
    content_of,
)
from surestep_gateway.request.prepared import Prompt

_MANY_EVENTS = 512  # are made fewer before there are more


@dataclass(slots=True)
class CompletionOutput:
    logprobs: GrowingLists
    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    drafted: list[bool] = field(default_factory=list)  # of the tokens, where that is wanted
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    violations: Violations | None = None

    @property
    def text(self) -> str:
        return content_of(self.events)

    def add(self, delta: Delta, logprobs: dict[str, Any] | None) -> None:
        """Append one delta, and its log-probabilities in the endpoint's format."""
        self.events.extend(delta.events)
        if len(self.events) > _MANY_EVENTS:
            self.events = coalesce(self.events)
        self.token_ids.extend(delta.token_ids)
        self.drafted.extend(delta.each_drafted)
        if logprobs is not None:
            self.logprobs.extend(logprobs)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.violations = delta.violations


Json = dict[str, Any]


def message_delta(events: Sequence[Event]) -> Json:
    """Return the `delta` of a chunk. Each call has one entry, its id and name in its first chunk.

    Reasoning has two names: `reasoning` is vLLM's current one, `reasoning_content` the one that
    most clients were written for.
    """
    delta: Json = {}
    calls: dict[int, Json] = {}
    for event in events:
        match event:
            case Reasoning(text):
                delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + text
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case ToolCallStart(index, name):
                calls[index] = _new_call(index, name)
            case ToolArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _new_call(index: int, name: str) -> Json:
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def whole_message(events: Sequence[Event], role: str, *, reasoning: bool) -> Json:
    """Return the `message`. With `reasoning` its keys are present, null where there was none."""
    delta = message_delta(coalesce(events))
    message: Json = {"role": role, "content": delta.get("content"), "refusal": None}
    if reasoning:
        thought = delta.get("reasoning")
        message |= {"reasoning": thought, "reasoning_content": thought}
    if "tool_calls" in delta:
        message["tool_calls"] = [_without_index(call) for call in delta["tool_calls"]]
    elif not delta:  # an empty answer is no missing one
        message["content"] = ""
    return message


def _without_index(call: Json) -> Json:
    return {key: value for key, value in call.items() if key != "index"}


_SLICE_IDS = 1 << 16


class ChoiceBuilder(Protocol):
    """The response format of one endpoint. Slow methods are async and let other tasks run."""

    name: str  # of the whole object
    chunk_name: str  # of a piece

    @property
    def head(self) -> Json:
        """Return further keys of both."""

    async def opening(self, sequence: OutputSequence) -> Json | None:
        """Return the choice that opens a sequence's stream, None if there is none."""

    def piece(self, sequence: OutputSequence, delta: Delta) -> Json | None:
        """Return the choice of one delta, None if it is empty."""

    async def before(self, sequence: OutputSequence) -> GrowingLists:
        """Return the log-probabilities in front of those of the first delta."""

    def logprobs(self, sequence: OutputSequence, found: Sequence[Position] | None) -> Json | None:
        """Return the log-probabilities of one delta."""

    async def whole(self, sequence: OutputSequence, gathered: CompletionOutput) -> Json:
        """Return the choice of a finished sequence."""

    async def extra(self) -> Json:
        """Return further keys of the whole object and of the first chunk."""


class Choices:
    """Common part of all formats, log-probabilities as chats have them among it."""

    @property
    def head(self) -> Json:
        """Return further keys of every object."""
        return {}

    def __init__(self, gateway: Gateway, generation: Generation) -> None:
        self._gateway = gateway
        self._generation = generation
        self._token_ids = bool(generation.body.return_token_ids)
        self._drafted = wants_drafted(generation.body)
        self._every_token = self._token_ids or self._drafted  # also those without text

    @cached_property
    def _speller(self) -> TokenSpeller:
        as_ids = self._generation.body.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = self._gateway.settings.return_tokens_as_token_ids
        return TokenSpeller(self._gateway.tokenizer, as_ids=as_ids)

    async def before(self, sequence: OutputSequence) -> GrowingLists:
        lists = GrowingLists()
        lists.extend(chat_logprobs([], self._speller))
        return lists

    def logprobs(self, sequence: OutputSequence, found: Sequence[Position] | None) -> Json | None:
        return None if found is None else chat_logprobs(found, self._speller)

    async def extra(self) -> Json:
        """Return the prompt's log-probabilities: all choices share the prompt."""
        found = self._generation.sequences[0].prompt_logprobs
        if found is None:
            return {}
        return {"prompt_logprobs": await _prompt_logprobs(found, self._speller)}


class ChatChoices(Choices):
    """/v1/chat/completions"""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, gateway: Gateway, generation: Generation) -> None:
        super().__init__(gateway, generation)
        self._role = generation.role
        self._show_reasoning = getattr(generation.body, "include_reasoning", None) is not False

    async def opening(self, sequence: OutputSequence) -> Json | None:
        """Return the role, and the part of the prompt that is to be echoed."""
        delta = {"role": self._role, "content": self._generation.prompts[0].text or ""}
        return {"index": sequence.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, sequence: OutputSequence, delta: Delta) -> Json | None:
        """Return the message's delta, and the finish reason in the last one."""
        message = message_delta(self._shown(delta.events))
        if not (message or delta.finish_reason or delta.logprobs or self._every_token):
            return None
        choice: Json = {
            "index": sequence.index,
            "delta": message,
            "logprobs": self.logprobs(sequence, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = list(delta.token_ids)
        if self._drafted:
            choice["drafted"] = delta.each_drafted
        if delta.violations is not None:
            choice |= violations_shown(delta.violations)
        return choice

    async def whole(self, sequence: OutputSequence, gathered: CompletionOutput) -> Json:
        wanted = sequence.journal.sampling.want_logprobs
        reasoning = sequence.num_reasoning_tokens is not None
        message = whole_message(self._shown(gathered.events), self._role, reasoning=reasoning)
        if begun := self._generation.prompts[0].text:
            message["content"] = begun + (message["content"] or "")
        choice: Json = {
            "index": sequence.index,
            "message": message,
            "logprobs": gathered.logprobs.finish() if wanted else None,
            "finish_reason": gathered.finish_reason,
            "stop_reason": gathered.stop_reason,
        }
        if self._token_ids:
            choice["token_ids"] = gathered.token_ids
        if self._drafted:
            choice["drafted"] = gathered.drafted
        return choice | violations_shown(gathered.violations)

    async def extra(self) -> Json:
        """Return the prompt's ids too."""
        ids = await _ids(self._generation.prompts[0]) if self._token_ids else None
        return ({} if ids is None else {"prompt_token_ids": ids}) | await super().extra()

    def _shown(self, events: Sequence[Event]) -> Sequence[Event]:
        if self._show_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]


class CompletionChoices(Choices):
    """/v1/completions"""

    name = chunk_name = "text_completion"

    def __init__(self, gateway: Gateway, generation: Generation) -> None:
        super().__init__(gateway, generation)
        self._new_detokenizer: Callable[[Sequence[int]], Detokenizer] = lambda prompt_ids: (
            detokenizer(gateway, generation.body, prompt_ids)
        )
        self._echo = bool(getattr(generation.body, "echo", None))
        self._logprobs: dict[int, CompletionLogprobs] = {}

    async def opening(self, sequence: OutputSequence) -> Json | None:
        """Return the echoed prompt."""
        if not self._echo:
            return None
        choice = self._choice(sequence, self._prompt_text(sequence), None, None)
        if sequence.journal.sampling.want_logprobs:
            choice["logprobs"] = (await self.before(sequence)).finish()
        return choice

    def piece(self, sequence: OutputSequence, delta: Delta) -> Json | None:
        """Return the text, and the finish reason in the last chunk."""
        text = delta.text
        if not (text or delta.finish_reason or delta.logprobs or self._every_token):
            return None
        choice = self._choice(sequence, text, delta.finish_reason, delta.stop_reason)
        choice["logprobs"] = self.logprobs(sequence, delta.logprobs)
        if self._token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if sequence.num_tokens == len(delta.token_ids):  # the first one
                choice["prompt_token_ids"] = list(self._generation.prompt_of(sequence).token_ids)
        if self._drafted:
            choice["drafted"] = delta.each_drafted
        if delta.violations is not None:
            choice |= violations_shown(delta.violations)
        return choice

    async def before(self, sequence: OutputSequence) -> GrowingLists:
        """Return those of the echoed prompt."""
        lists = GrowingLists()
        lists.extend(self._build(sequence, []))
        if self._echo and sequence.journal.sampling.want_logprobs:
            prompt = self._generation.prompt_of(sequence)
            text = TextOfClient(prompt.text or "", self._gateway.tokenizer)
            builder = CompletionLogprobs(self._speller, text)
            lists.extend(builder.build(prompt.token_ids[:1]))
            for part in position_slices(sequence.prompt_logprobs or LogprobColumns()):
                lists.extend(builder.build(part))
                await asyncio.sleep(0)
        return lists

    def logprobs(self, sequence: OutputSequence, found: Sequence[Position] | None) -> Json | None:
        return None if found is None else self._build(sequence, found)

    async def whole(self, sequence: OutputSequence, gathered: CompletionOutput) -> Json:
        text = self._prompt_text(sequence) + gathered.text if self._echo else gathered.text
        choice = self._choice(sequence, text, gathered.finish_reason, gathered.stop_reason)
        if sequence.journal.sampling.want_logprobs:
            choice["logprobs"] = gathered.logprobs.finish()
        if self._token_ids:
            choice["token_ids"] = gathered.token_ids
            choice["prompt_token_ids"] = await _ids(self._generation.prompt_of(sequence))
        if self._drafted:
            choice["drafted"] = gathered.drafted
        if self._generation.body.prompt_logprobs is not None:
            found = sequence.prompt_logprobs or LogprobColumns()
            choice["prompt_logprobs"] = await _prompt_logprobs(found, self._speller)
        return choice | violations_shown(gathered.violations)

    async def extra(self) -> Json:
        """Return nothing: every choice may have its own prompt."""
        return {}

    def _choice(
        self,
        sequence: OutputSequence,
        text: str,
        finish_reason: str | None,
        stop_reason: str | int | None,
    ) -> Json:
        return {
            "index": sequence.index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _build(self, sequence: OutputSequence, found: Sequence[Position | int]) -> Json:
        builder = self._logprobs.get(sequence.index)
        if builder is None:
            start = len(self._prompt_text(sequence)) if self._echo else 0
            prompt = self._generation.prompt_of(sequence)
            before = [*prompt.token_ids, *emitted_before(self._generation.body)]
            text = TextOfTokens(self._new_detokenizer(before), start=start)
            builder = CompletionLogprobs(self._speller, text)
            self._logprobs[sequence.index] = builder
        return builder.build(found)

    def _prompt_text(self, sequence: OutputSequence) -> str:
        return self._generation.prompt_of(sequence).text or ""


def envelope(generation: Generation, name: str) -> Json:
    """Return what every object of a response begins with."""
    return {
        "id": generation.id,
        "object": name,
        "created": generation.created,
        "model": generation.model,
    }


async def _ids(prompt: Prompt) -> RawJson:
    lists = GrowingLists()
    for at in range(0, len(prompt.token_ids), _SLICE_IDS):
        lists.extend({"ids": prompt.token_ids[at : at + _SLICE_IDS]})
        await asyncio.sleep(0)
    return lists.finish()["ids"]


async def _prompt_logprobs(found: LogprobColumns, speller: TokenSpeller) -> RawJson:
    lists = GrowingLists()
    lists.extend({"all": [None]})  # of the first token
    for part in position_slices(found):
        lists.extend({"all": prompt_logprobs(part, speller.text)})
        await asyncio.sleep(0)
    return lists.finish()["all"]
