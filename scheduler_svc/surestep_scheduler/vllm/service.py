"""The service vllm.grpc.engine.VllmEngine: the Scheduler service for routers made for vLLM.

It translates, and nothing else: every sequence of a request is a request to SchedulerService, which
admits, bounds, traces and counts it, and keeps it through the loss of a worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from surestep_common.errors import InvalidRequest, Unimplemented
from surestep_proto import smg_common_pb2, vllm_engine_pb2
from surestep_proto.vllm_engine_pb2_grpc import VllmEngineServicer

from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.service.service import SchedulerService

from .facts import Facts
from .merged import Merged
from .request import choices, without_effect
from .response import ChoiceResponses
from .tokenizer_files import Bundles

WITHOUT_EFFECT_KEY = "surestep-without-effect"  # trailing metadata: names of fields
_CHUNK_BYTES = 64 << 10  # of an archive


class VllmService(VllmEngineServicer):
    """Handlers of vllm_engine.proto. Errors become statuses in the server's interceptor."""

    def __init__(
        self,
        engine: Engine,
        scheduler: SchedulerService,
        tasks: asyncio.TaskGroup,
        served_model_name: str = "",
    ) -> None:
        """`tasks` outlive all calls."""
        self._engine = engine
        self._scheduler = scheduler
        self._tasks = tasks
        self._facts = Facts(engine, served_model_name)
        self._calls: dict[str, Merged] = {}  # open ones of Generate, by the client's id
        self._bundles = Bundles()

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """The tokens of all sequences. Cancelling the call aborts them."""
        self._facts.received_at = time.time()
        requests = []
        for one in choices(request, self._engine.limits):
            requests.append(one)
            await asyncio.sleep(0)  # steps go on between copies of a long prompt
        if in_vain := without_effect(request):
            context.set_trailing_metadata(((WITHOUT_EFFECT_KEY, ",".join(in_vain)),))
        eos_ids = self._engine.model.eos_token_ids
        sequences = [
            ChoiceResponses(request, index, one.prompt_ids, eos_ids)
            for index, one in enumerate(requests)
        ]
        if request.request_id in self._calls:
            raise InvalidRequest(
                f"request '{request.request_id}' is open already", param="request_id"
            )
        streams = [self._scheduler.Generate(one, context) for one in requests]
        call = self._calls[request.request_id] = Merged(self._tasks, streams)
        try:
            async for index, chunk in call:
                for response in sequences[index].add(chunk):
                    yield response
            for sequence in sequences:
                if not sequence.ended:
                    yield sequence.abort()
        finally:
            del self._calls[request.request_id]
            await call.close()

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Any
    ) -> vllm_engine_pb2.AbortResponse:
        """End requests; their calls get what has come of them."""
        for request_id in request.request_ids:
            if call := self._calls.get(request_id):
                call.stop()
        return vllm_engine_pb2.AbortResponse()

    async def Embed(self, request: vllm_engine_pb2.EmbedRequest, context: Any) -> NoReturn:
        """Not served."""
        raise Unimplemented(
            "Embed does not say how the vector is made of the tokens: use /v1/embeddings of the "
            "gateway, or surestep.v1.Scheduler.Generate with `pooling`"
        )

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Any
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Return whether new requests are computed now."""
        return self._facts.health()

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Facts of the served model. Raises Unavailable before the workers were reached."""
        return self._facts.model()

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Any
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Facts of this scheduler. Raises Unavailable before the workers were reached."""
        return self._facts.server()

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Any
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Tell the load."""
        if request.dp_rank:
            raise InvalidRequest(f"dp_rank={request.dp_rank}: there is rank 0", param="dp_rank")
        return self._facts.loads()

    async def GetTokenizer(
        self, request: smg_common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[smg_common_pb2.GetTokenizerChunk]:
        """Files of the model's tokenizer. Raises NotFound where this machine has not got them."""
        model = self._engine.model
        data, digest = await self._bundles.get(model.model_path, model.model_fingerprint)
        for start in range(0, len(data), _CHUNK_BYTES):
            last = start + _CHUNK_BYTES >= len(data)
            yield smg_common_pb2.GetTokenizerChunk(
                data=data[start : start + _CHUNK_BYTES], sha256=digest if last else ""
            )

    async def SubscribeKvEvents(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise Unimplemented(
            "the contents of the prefix cache are not reported: let the router keep an account of "
            "its own, as SMG's cache_aware policy does without events"
        )

    async def FlushCache(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise Unimplemented("the prefix cache is not emptied while the server runs")

    async def StartProfile(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise Unimplemented("there is no profiler here: see the metrics of steps and the traces")

    async def StopProfile(self, request: Any, context: Any) -> NoReturn:
        """Not served."""
        raise Unimplemented("there is no profiler here")
