"""From a request body to the sequences that answer it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_common.request_bounds import check_prompt_logprobs
from surestep_proto.engine_pb2 import SamplingParams
from surestep_proto.generate_pb2 import GenerateRequest

from .bad_words import bad_words
from .context import Gateway
from .detokenize import Detokenizer, StopScanner, TextAssembler
from .journal import Journal, OpenRequest, Patience
from .metrics import SequenceTimer
from .output import ChatOutput
from .parsers import OutputParser
from .prompts import Prompt, chat_prompt, completion_prompts
from .protocol import ChatBody, CompletionBody, GenerationBody
from .sampling import max_tokens, sampling_params, sibling_seed
from .sequence import OutputSequence
from .siblings import Siblings
from .tenants import Caller
from .unsupported import refuse_unsupported

MAX_SEQUENCES = 1024  # in one request

_MAX_OPEN_TOKENS = 1 << 22  # of the prompts of one request that are on their way at once


class Origin(NamedTuple):
    """Where a request came from."""

    request_id: str
    arrived: float  # on the clock of time.perf_counter
    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A request that passed every check, ready to run."""

    id: str
    model: str
    created: int  # seconds since 1970
    seed: int
    origin: Origin
    body: GenerationBody
    prompts: Sequence[Prompt]
    sequences: Sequence[OutputSequence]  # index = prompt * n + sibling
    max_open: int  # sequences the scheduler can run at once

    def prompt_of(self, sequence: OutputSequence) -> Prompt:
        """The prompt that a sequence goes on from."""
        return self.prompts[sequence.index // (self.body.n or 1)]


async def chat_generation(gateway: Gateway, body: ChatBody, origin: Origin) -> Generation:
    """Raises SurestepError for anything wrong with the request or the time."""
    _check_common(gateway, body, origin)
    output = ChatOutput(gateway.settings, body)
    prompt = await chat_prompt(gateway, body)
    new_parser = partial(output.parser, prompt)
    generation_id = f"chatcmpl-{origin.request_id}"
    return await _generation(gateway, body, generation_id, [prompt], origin, new_parser)


async def completion_generation(
    gateway: Gateway, body: CompletionBody, origin: Origin
) -> Generation:
    """Raises SurestepError for anything wrong with the request or the time."""
    _check_common(gateway, body, origin)
    prompts = await completion_prompts(gateway, body)
    if len(prompts) * (body.n or 1) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n={body.n} are more than {MAX_SEQUENCES} sequences",
            param="n",
        )
    generation_id = f"cmpl-{origin.request_id}"
    return await _generation(gateway, body, generation_id, prompts, origin, OutputParser)


def _check_common(gateway: Gateway, body: GenerationBody, origin: Origin) -> None:
    gateway.check_model(body.model)
    origin.caller.check_priority(body.priority)
    n = body.n or 1
    if n > gateway.settings.max_n:
        raise InvalidRequest(f"n must be at most {gateway.settings.max_n}, got {n}", param="n")
    refuse_unsupported(body, n)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest(
            "'prompt_logprobs' are not available with 'stream'", param="prompt_logprobs"
        )


async def _generation(
    gateway: Gateway,
    body: GenerationBody,
    generation_id: str,
    prompts: Sequence[Prompt],
    origin: Origin,
    new_parser: Callable[[], OutputParser],
) -> Generation:
    info, n = gateway.pool.info, body.n or 1
    count = len(prompts) * n
    sampling = sampling_params(
        body,
        info,
        gateway.settings.max_logprobs,
        bad_words=await bad_words(body.bad_words or (), gateway.tokenizer, count),
        num_sequences=count,
    )
    longest = max(len(prompt.token_ids) for prompt in prompts)
    check_prompt_logprobs(sampling, longest)
    maker = _SequenceMaker(
        gateway=gateway,
        body=body,
        # Clients may repeat an id of theirs; the scheduler's must be unique among open requests.
        call_id=f"{generation_id}-{secrets.token_hex(4)}",
        sampling=sampling,
        seed=secrets.randbits(64) if body.seed is None else body.seed,
        origin=origin,
        new_parser=new_parser,
        deadline=asyncio.get_running_loop().time() + gateway.settings.request_timeout_s,
        siblings=Siblings(),
    )
    columns = [GenerateRequest(prompt_ids=prompt.token_ids).prompt_ids for prompt in prompts]
    return Generation(
        id=generation_id,
        model=gateway.check_model(body.model),
        created=int(time.time()),
        seed=maker.seed,
        origin=origin,
        body=body,
        prompts=prompts,
        sequences=[maker.make(index, columns[index // n]) for index in range(count)],
        max_open=max(1, min(info.max_num_seqs, _MAX_OPEN_TOKENS // longest)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceMaker:
    gateway: Gateway
    body: GenerationBody
    call_id: str
    sampling: SamplingParams  # without seed
    seed: int
    origin: Origin
    new_parser: Callable[[], OutputParser]
    deadline: float  # of the whole request, on the event loop's clock
    siblings: Siblings

    def make(self, index: int, prompt_ids: Sequence[int]) -> OutputSequence:
        journal, pool = self._journal(index, prompt_ids), self.gateway.pool
        source = OpenRequest(pool, journal, self._patience(), self.deadline, self.siblings)
        timer = SequenceTimer(self.gateway.metrics, self.origin.arrived)
        eos_ids = self.gateway.pool.info.eos_token_ids
        return OutputSequence(index, journal, source, self._assembler(), eos_ids, timer)

    def _journal(self, index: int, prompt_ids: Sequence[int]) -> Journal:
        body = self.body
        return Journal(
            request_id=f"{self.call_id}-{index}",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens(body, len(prompt_ids), self.gateway.pool.info),
            sampling=self.sampling,
            seed=sibling_seed(self.seed, index % (body.n or 1)),
            tenant=self.origin.caller.tenant(body.user),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            num_draft_tokens=body.speculative.num_tokens if body.speculative else None,
        )

    def _assembler(self) -> TextAssembler:
        include_stop = bool(self.body.include_stop_str_in_output)
        parser = self.new_parser()
        return TextAssembler(
            detokenizer(self.gateway, self.body, shown=parser.markers),
            StopScanner(stop_strings(self.body), include_stop=include_stop),
            parser,
            min_tokens=self.sampling.min_tokens,
            include_stop=include_stop,
        )

    def _patience(self) -> Patience:
        settings = self.gateway.settings
        return Patience(
            admission_s=settings.admission_timeout_s,
            first_token_s=settings.first_token_timeout_s,
            inter_token_s=settings.inter_token_timeout_s,
            resume_s=settings.resume_timeout_s,
            max_resumes=settings.max_resumes,
        )


def detokenizer(
    gateway: Gateway, body: GenerationBody, *, shown: Sequence[str] = ()
) -> Detokenizer:
    """A fresh one, as the request wants it; the special tokens `shown` are needed in any case."""
    skip = body.skip_special_tokens is not False
    return Detokenizer(gateway.tokenizer, skip_special_tokens=skip, shown=shown)


def stop_strings(body: GenerationBody) -> list[str]:
    """Stop strings of a request; one alone may be empty, which asks for none."""
    if isinstance(body.stop, str):
        return [body.stop] if body.stop else []
    return body.stop or []
