"""Engine of Dynamo's unified backend: its requests as streams of a scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self

from dynamo._core import Context
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.llm import exceptions
from surestep.client import AsyncClient, Tls
from surestep_common import errors
from surestep_common.model_files import name_of
from surestep_proto.sampling_pb2 import LogprobColumns
from surestep_proto.scheduler_pb2 import ABORTED, LENGTH, GenerateChunk, SchedulerInfo

from .command import Dynamo
from .request import Fields, Wanted, wanted

Chunk = dict[str, Any]
_REASONS = {LENGTH: "length", ABORTED: "cancelled"}
_THEIRS: list[tuple[type[errors.SurestepError], type[exceptions.DynamoException]]] = [
    (errors.InvalidRequest, exceptions.InvalidArgument),
    (errors.RequestTooLarge, exceptions.InvalidArgument),
    (errors.QueueFull, exceptions.WorkerUnavailable),
    (errors.Unavailable, exceptions.EngineShutdown),  # which another worker may take over
    (errors.ModelChanged, exceptions.EngineShutdown),
    (errors.DeadlineExceeded, exceptions.ConnectionTimeout),
    (errors.Cancelled, exceptions.Cancelled),
]
_AGAIN_S = 1.0
_REGISTERED = "model_path", "vocab_size", "max_model_len", "block_size", "eos_token_ids"
_log = logging.getLogger(__name__)


def theirs(error: errors.SurestepError) -> exceptions.DynamoException:
    """Return Dynamo's error for one of ours."""
    kind = next((kind for ours, kind in _THEIRS if isinstance(error, ours)), exceptions.Unknown)
    return kind(str(error))


class SurestepEngine(LLMEngine):
    """Model of a scheduler, as Dynamo asks for it. Serves within `async with`."""

    def __init__(self, settings: Dynamo) -> None:
        """Connect; needs a running event loop."""
        self._settings = settings
        key, ca = settings.grpc_api_key, settings.ssl_ca_certs
        self._client = AsyncClient(
            settings.scheduler,
            api_key=key.get_secret_value() if key is not None else None,
            tls=Tls(ca=ca) if ca is not None else None,
            retry_for_s=settings.retry_for_s,
        )
        self._info = SchedulerInfo()
        self._tasks = asyncio.TaskGroup()
        self._readers: dict[str, asyncio.Task[None]] = {}  # by the id of the request
        self._lost: errors.Unavailable | None = None  # since it has been without workers for long

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Self, WorkerConfig]:
        """Read the flags of the command."""
        engine = cls(Dynamo.load(argv or []))
        return engine, await engine.config()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._watching = self._tasks.create_task(self._watch())
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in (self._watching, *self._readers.values()):
            task.cancel()
        await self._tasks.__aexit__(*error)

    async def config(self) -> WorkerConfig:
        """Return how it is found, when the scheduler has a model."""
        settings = self._settings
        await self._meet_model()
        return WorkerConfig(
            namespace=settings.namespace,
            component=settings.component,
            endpoint=settings.endpoint,
            model_name=self._model,
            served_model_name=self._name,
            discovery_backend=settings.discovery_backend,
            request_plane=settings.request_plane,
            event_plane=settings.event_plane,
            tool_call_parser=settings.dyn_tool_call_parser,
            reasoning_parser=settings.dyn_reasoning_parser,
        )

    @property
    def _model(self) -> str:
        return str(self._settings.model or self._info.model_path)

    @property
    def _name(self) -> str:
        """The model's name: what the gateway calls its folder, unless told."""
        return self._settings.served_model_name or name_of(Path(self._model).resolve())

    async def _meet_model(self) -> None:
        """Wait until the scheduler tells of its model."""
        said = ""
        while True:
            try:
                self._info = await self._client.info()
                return
            except errors.Unavailable as error:
                if str(error) != said:
                    said = str(error)
                    _log.info("waiting for the scheduler: %s", said)
                await asyncio.sleep(_AGAIN_S)

    async def _watch(self) -> None:
        """Leave requests to another worker, once the scheduler has had none of its own for long."""
        served = time.monotonic()
        while True:
            await asyncio.sleep(_AGAIN_S)
            try:
                await self._client.info()
            except errors.Unavailable as error:
                if time.monotonic() - served < self._settings.retry_for_s:
                    continue
                self._lost = error
                for reader in self._readers.values():
                    reader.cancel()
            except errors.SurestepError:  # no answer, which the requests notice
                continue
            else:
                served, self._lost = time.monotonic(), None

    async def start(self, worker_id: int) -> EngineConfig:
        """Return the facts of the model that a router may want."""
        info = self._info
        return EngineConfig(
            model=self._model,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.num_blocks - 1,  # block 0 holds nothing
                max_num_seqs=info.max_num_seqs,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where the scheduler's events are, for which the frontend's router asks."""
        endpoint, topic = self._settings.kv_events_endpoint, self._settings.kv_events_topic
        return [] if endpoint is None else [ZmqSource(endpoint, topic)]

    async def generate(
        self, request: dict[str, Any], context: Context
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the tokens as they come, or together where they are held. Raise DynamoException.

        A task of its own reads them: where a client leaves, Dynamo drops this generator wherever it
        is, and calls `abort`.
        """
        name, chunks = context.id(), asyncio.Queue[Chunk | Exception | None]()
        self._readers[name] = self._tasks.create_task(self._read(request, name, chunks))
        while (chunk := await chunks.get()) is not None:
            if isinstance(chunk, errors.SurestepError):
                raise theirs(chunk) from chunk
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def abort(self, context: Context) -> None:
        """End a request whose client has left."""
        if (reader := self._readers.get(context.id())) is not None:
            reader.cancel()

    async def _read(
        self, request: Fields, name: str, chunks: asyncio.Queue[Chunk | Exception | None]
    ) -> None:
        """Put the chunks of a request, what it ends with if it fails, and None."""
        held: list[Chunk] = []
        try:
            if self._lost is not None:
                raise self._lost
            asked = wanted(request, name, self._info.defaults)
            asked.options["model_fingerprint"] = self._info.model_fingerprint
            async with aclosing(self._chunks(asked)) as coming:
                async for chunk in coming:
                    if asked.held:
                        held.append(chunk)
                    else:
                        chunks.put_nowait(chunk)
            for chunk in held:
                chunks.put_nowait(chunk)
        except asyncio.CancelledError:
            chunks.put_nowait(self._lost)  # or None: its client has left
            raise
        except Exception as error:  # noqa: BLE001  # raised where the chunks are read
            if isinstance(error, errors.ModelChanged):
                await self._renew()
            chunks.put_nowait(error)
        finally:
            del self._readers[name]
            chunks.put_nowait(None)

    async def _renew(self) -> None:
        """Serve the weights that the scheduler has now; end if the registration does not fit."""
        with suppress(errors.SurestepError):  # the next request tries again
            info = await self._client.info()
            if any(getattr(info, fact) != getattr(self._info, fact) for fact in _REGISTERED):
                _log.error("the scheduler serves another model than is registered: worker ends")
                os.kill(os.getpid(), signal.SIGTERM)
            self._info = info

    async def _chunks(self, asked: Wanted) -> AsyncGenerator[Chunk, None]:
        count = cached = 0
        scored: list[Any] = []  # positions of the prompt
        stream = self._client.stream(asked.prompt_ids, asked.sampling, **asked.options)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                count += len(chunk.token_ids)
                if chunk.HasField("start"):
                    cached = chunk.start.num_cached_tokens
                if chunk.HasField("prompt_logprobs"):
                    scored += map(_by_token, _alternatives(chunk.prompt_logprobs))
                if chunk.token_ids or chunk.finish_reason:
                    told = _told(chunk, asked, count, cached)
                    if chunk.finish_reason and asked.sampling.want_prompt_logprobs:
                        told["engine_data"] = {"prompt_logprobs": [None, *scored]}
                    yield told

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return the smallest request there is."""
        eos = self._info.eos_token_ids
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=eos[0] if eos else 0)
        return payload

    async def cleanup(self) -> None:
        """Close the connection, and with it what is open."""
        self._watching.cancel()
        await self._client.close()


async def serve(settings: Dynamo) -> None:
    """Serve until a signal, which Dynamo takes."""
    async with SurestepEngine(settings) as engine:
        await Worker(engine, await engine.config()).run()


def _told(chunk: GenerateChunk, asked: Wanted, count: int, cached: int) -> Chunk:
    told: Chunk = {"token_ids": list(chunk.token_ids), "index": 0}
    if asked.sampling.want_logprobs:
        told["log_probs"] = list(chunk.logprobs.logprob)
        told["top_logprobs"] = list(_alternatives(chunk.logprobs))
    if chunk.finish_reason:
        told["finish_reason"] = _REASONS.get(chunk.finish_reason, "stop")
        prompt = len(asked.prompt_ids)
        told["completion_usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    return told


def _alternatives(columns: LogprobColumns) -> Iterator[list[dict[str, Any]]]:
    """Yield for each token the likeliest ones at its position, itself among them or behind them."""
    begin = 0
    for token, logprob, rank, num in zip(
        columns.token_id, columns.logprob, columns.rank, columns.num_top, strict=True
    ):
        ids = columns.top_token_ids[begin : begin + num]
        tops = zip(ids, columns.top_logprobs[begin : begin + num], strict=True)
        begin += num
        rows = [_row(each, value, place) for place, (each, value) in enumerate(tops, 1)]
        yield rows if token in ids else [*rows, _row(token, logprob, rank)]


def _by_token(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return a position of the prompt, as Dynamo tells it."""
    return {str(r["token_id"]): {"logprob": r["logprob"], "rank": r["rank"]} for r in rows}


def _row(token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"token_id": token, "logprob": logprob, "rank": rank, "token": None}
