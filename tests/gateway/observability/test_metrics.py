from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry
from surestep_gateway.observability.metrics import EventLoopMetrics


async def test_a_loop_that_stands_still_is_seen() -> None:
    registry = CollectorRegistry()
    metrics = EventLoopMetrics(registry)
    watch = asyncio.ensure_future(metrics.watch())
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251  # that is what is measured
    await asyncio.sleep(0.05)
    computed = time.thread_time() + 0.3
    while time.thread_time() < computed:
        pass
    await asyncio.sleep(0.05)
    watch.cancel()
    await asyncio.wait([watch])

    def value(name: str, **labels: str) -> float:
        found = registry.get_sample_value(f"surestep:event_loop_{name}", labels)
        assert found is not None
        return found

    assert value("longest_stall_seconds") > 0.2
    assert value("stall_seconds_count") - value("stall_seconds_bucket", le="0.1") >= 2
    assert value("busy_seconds_count") - value("busy_seconds_bucket", le="0.1") == 1
