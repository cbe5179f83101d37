"""Preparing requests without blocking the event loop: small ones on it, the rest elsewhere.

A TextProcessor has what that takes, wherever it happens. A Job says how a kind of request is
drafted, and how its result crosses processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import orjson
from surestep_proto.scheduler_pb2 import SchedulerInfo
from tokenizers import Tokenizer as RustTokenizer

from surestep_gateway.settings.api_settings import ApiSettings
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.chat_template import ChatTemplate
from surestep_gateway.text.pool import TextPool
from surestep_gateway.text.process_limits import NeedsProcess, TurnLimit, computing_limit
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from surestep_gateway.text.wire import Parts
from surestep_gateway.text.work_gate import WorkGate

T = TypeVar("T")

_CHECK_S = 0.5  # of computing, to check a schema, a regular expression or a grammar
_TURN_S = 0.05  # that a template may compute on the event loop; usual ones take less than 1 ms
_NEEDED = {  # of the settings, in a text process; no keys, and no files
    "model",
    "trust_request_chat_template",
    "chat_template_timeout_s",
    "text_memory_bytes",
    "reasoning_parser",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "max_n",
    "max_logprobs",
    "allow_special_tokens_in_content",
    "max_answer_bytes",
    "log_level",
    "log_json",
    "hf_overrides",
    *ApiSettings.__annotations__,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProcessor:
    """Everything needed to prepare requests, on the event loop or in a text process."""

    settings: GatewaySettings
    tokenizer: Tokenizer
    template: ChatTemplate
    turn: TurnLimit = field(default_factory=lambda: TurnLimit(_TURN_S))  # of a template
    tell: Callable[[str], None] | None = None  # in a text process: the field that is checked now

    @classmethod
    def load(cls, settings: GatewaySettings) -> TextProcessor:
        """Read the model folder. Raise InvalidRequest."""
        folder = settings.tokenizer or settings.model
        return cls(
            settings=settings,
            tokenizer=Tokenizer.load(folder),
            template=ChatTemplate.load(folder, settings.chat_template),
        )

    def dump(self) -> list[bytes]:
        """Return the content for `restore`: the model folder may be gone when the process
        starts.
        """
        settings = self.settings.model_dump(mode="json", include=_NEEDED)
        settings["served_model_name"] = self.settings.model_names
        return [
            orjson.dumps(settings),
            self.tokenizer.definition.encode(),
            orjson.dumps(self.template.definition),
        ]

    @classmethod
    def restore(
        cls, parts: Sequence[bytes], tell: Callable[[str], None] = lambda field: None
    ) -> TextProcessor:
        """Return the text processor of a text process."""
        settings, tokenizer, template = parts
        source, special_tokens, tool_source = orjson.loads(template)
        return cls(
            settings=GatewaySettings.model_validate(orjson.loads(settings)),
            tokenizer=Tokenizer(RustTokenizer.from_str(tokenizer.decode())),
            template=ChatTemplate(source, special_tokens, tool_source=tool_source),
            tell=tell,
        )

    @property
    def apart(self) -> bool:
        """Return whether this is a text process."""
        return self.tell is not None

    @contextlib.contextmanager
    def checking(self, field: str) -> Iterator[None]:
        """Bound the work on the grammar that a field asks for; it may end this text process."""
        if self.tell is None:
            yield
            return
        self.tell(field)
        with computing_limit(_CHECK_S):
            yield
        self.tell("")

    def only_apart(self, condition: bool) -> None:
        """Raise NeedsProcess if the condition holds and this is no text process."""
        if condition and not self.apart:
            raise NeedsProcess


@dataclass(frozen=True, slots=True)
class Draft(Generic[T]):
    """The work left once the texts have been encoded."""

    texts: Texts
    finish: Callable[[Sequence[list[int]]], T]  # takes the ids of each text


Kind = Callable[[TextProcessor, bytes | bytearray, SchedulerInfo], Draft[T]]


class Job(NamedTuple, Generic[T]):
    """A kind of request."""

    name: bytes
    draft: Kind[T]
    dump: Callable[[T], Parts]
    load: Callable[[Sequence[bytes]], T]


def dump_bytes(answer: bytes) -> Parts:
    """Serialise a result that is bytes already."""
    return [answer]


def load_bytes(parts: Sequence[bytes]) -> bytes:
    """Return such a result."""
    return parts[0]


INLINE_BYTES = 64 << 10  # of a body that is prepared on the event loop: a few milliseconds
_AT_ONCE_BYTES = 4 << 10  # of one that does not even wait for its turn: about a millisecond
_THREADS = 2


class TextService:
    """Prepares requests of one model. Needs a running event loop."""

    def __init__(self, processor: TextProcessor, pool: TextPool) -> None:
        """`pool` is shared with other models, and must be running."""
        self._processor = processor
        self._pool = pool
        self._turn = asyncio.Lock()
        self._gate = WorkGate(_THREADS, large=INLINE_BYTES)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Begin no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def at_once(self, job: Job[T], raw: bytearray, info: SchedulerInfo) -> T | None:
        """Prepare a small body; return None where `prepare` is needed. Raise SurestepError."""
        if len(raw) > _AT_ONCE_BYTES:
            return None
        try:
            draft = job.draft(self._processor, raw, info)
        except NeedsProcess:
            return None
        return draft.finish(self._processor.tokenizer.encode(draft.texts))

    async def prepare(
        self, job: Job[T], raw: bytearray, info: SchedulerInfo, caller: str = ""
    ) -> T:
        """Prepare a body for a caller, who never holds all text processes. Raise SurestepError.

        If cancelled while it waits for its turn, no work begins.
        """
        if len(raw) <= INLINE_BYTES:
            try:
                return await self._inline(job, raw, info)
            except NeedsProcess:
                pass
        facts = info.SerializeToString()
        return job.load(await self._pool.ask(self._processor, job.name, facts, raw, caller))

    async def ask(self, job: Job[T], raw: bytearray, caller: str) -> T:
        """Run a job that needs no facts of the model in a text process. Raise SurestepError."""
        return job.load(await self._pool.ask(self._processor, job.name, b"", raw, caller))

    async def _inline(self, job: Job[T], raw: bytearray, info: SchedulerInfo) -> T:
        async with self._turn:
            try:
                draft = job.draft(self._processor, raw, info)
            finally:
                await asyncio.sleep(0)  # the next task runs in the next iteration
        return draft.finish(await self._encode(draft.texts))

    async def _encode(self, texts: Texts) -> Sequence[list[int]]:
        """Encode in a thread. Work that has begun continues when its caller is cancelled."""
        size = texts.num_chars
        await self._gate.enter(size)
        loop = asyncio.get_running_loop()
        encoding = loop.run_in_executor(self._threads, self._processor.tokenizer.encode, texts)
        encoding.add_done_callback(lambda _: self._gate.leave(size))
        return await asyncio.shield(encoding)
