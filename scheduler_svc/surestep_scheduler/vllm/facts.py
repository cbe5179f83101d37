"""Facts about the scheduler in the terms of vllm.grpc.engine."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from surestep_common.errors import Unavailable
from surestep_common.releases import package_version
from surestep_common.request_params import neutral, shown
from surestep_proto import vllm_engine_pb2 as pb
from surestep_proto.sampling_pb2 import SamplingDefaults
from surestep_proto.scheduler_pb2 import EngineState

from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.service import report

_TOLD_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_WINDOW_S = 5.0  # over which tokens per second are counted, at least


class Facts:
    """Facts of one engine, for the messages of vllm.grpc.engine."""

    def __init__(self, engine: Engine, served_model_name: str) -> None:
        """An empty name stands for that of the model's folder."""
        self._engine = engine
        self._name = served_model_name
        self._version = package_version()
        self._began = time.monotonic()
        self._rate = Rate()
        self.received_at = 0.0  # seconds since 1970

    def health(self) -> pb.HealthCheckResponse:
        """Return the health service's answer. Raises Unavailable before the workers were reached.

        A server of vLLM does not even listen before that. A router that gets an answer takes the
        server for started, asks once which model it has, and never again.
        """
        engine = self._engine
        if engine.state is None:
            raise Unavailable(engine.waiting_for, retry_after=1.0)
        healthy = engine.engine_state == EngineState.SERVING
        state = EngineState.Name(engine.engine_state).lower()
        why = f"{state}: {engine.waiting_for}" if engine.waiting_for else state
        return pb.HealthCheckResponse(healthy=healthy, message=why)

    def model(self) -> pb.GetModelInfoResponse:
        """Raises Unavailable before the workers were reached."""
        model, limits = self._engine.model, self._engine.limits
        return pb.GetModelInfoResponse(
            model_path=model.model_path,
            tokenizer_path=model.model_path,
            served_model_name=self._name or Path(model.model_path).name,
            is_generation=not model.headless,
            max_context_length=limits.max_request_len,
            max_req_input_len=limits.max_request_len - 1,
            vocab_size=model.vocab_size,
            architectures=[model.architecture],
            eos_token_ids=model.eos_token_ids,
            default_sampling_params_json=_default_sampling(model.defaults),
        )

    def server(self) -> pb.GetServerInfoResponse:
        """Raises Unavailable before the workers were reached."""
        model, limits, stats = self._engine.model, self._engine.limits, report.stats(self._engine)
        return pb.GetServerInfoResponse(
            active_requests=stats.num_running + stats.num_waiting,
            last_receive_timestamp=self.received_at,
            uptime_seconds=time.monotonic() - self._began,
            server_type="surestep",
            data_parallel_size=1,
            kv_cache_dtype=model.dtype,
            block_size=limits.block_size,
            model_dtype=model.dtype,
            max_num_seqs=limits.num_slots,
        )

    def loads(self) -> pb.GetLoadsResponse:
        """All zero before the workers were reached."""
        stats = report.stats(self._engine)
        state = self._engine.state
        block_size = state.limits.block_size if state is not None else 0
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=stats.num_blocks_used * block_size,
            max_total_num_tokens=stats.num_blocks_total * block_size,
            token_usage=_share(stats.num_blocks_used, stats.num_blocks_total),
            gen_throughput=self._rate.at(self._engine.clock(), stats.generation_tokens),
            cache_hit_rate=_share(stats.prefix_cache_hits, stats.prefix_cache_queries),
            utilization=_share(stats.num_slots_used, stats.num_slots_total),
            max_running_requests=stats.num_slots_total,
            num_waiting_uncached_tokens=stats.num_queued_tokens,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._version,
            dp_rank_count=1,
            loads=[load],
        )


class Rate:
    """Growth of a counter, measured when it is asked for."""

    def __init__(self) -> None:
        self._older: tuple[float, int] | None = None
        self._newer: tuple[float, int] | None = None

    def at(self, now: float, count: int) -> float:
        """Return the rate per second since the count that is one or two windows old; 0 at first."""
        if self._newer is None or now - self._newer[0] >= _WINDOW_S:
            self._older, self._newer = self._newer or (now, count), (now, count)
        assert self._older is not None
        then, before = self._older
        return (count - before) / (now - then) if now > then else 0.0


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _default_sampling(defaults: SamplingDefaults) -> str:
    """Return defaults that differ from those of a request that says nothing."""
    ours, plain = shown(defaults), shown(neutral())
    told = {name: ours[name] for name in _TOLD_DEFAULTS if ours[name] != plain[name]}
    return json.dumps(told) if told else ""
