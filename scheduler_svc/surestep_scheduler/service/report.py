"""Reports of the scheduler about itself: Info, Status and Stats."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from surestep_common.errors import SurestepError, Unavailable
from surestep_proto import scheduler_pb2 as pb
from surestep_proto import worker_pb2

from surestep_scheduler.core.counters import Counters
from surestep_scheduler.core.messages import RankTimes
from surestep_scheduler.core.sequence import Sequence as TokenSequence
from surestep_scheduler.core.state import SchedulerState
from surestep_scheduler.engine.engine import Engine
from surestep_scheduler.engine.incidents import Cause, Incident
from surestep_scheduler.engine.steps import BOUNDS_S, StepTimes
from surestep_scheduler.engine.workers import WorkerGroup
from surestep_scheduler.speculation.speculation import Speculation

_TIMEOUT_S = 1.0  # for one question to a rank or supervisor


def info(engine: Engine) -> pb.SchedulerInfo:
    """Return facts of the served model. Raises Unavailable until every rank is ready."""
    limits = engine.limits
    if engine.engine_state not in (pb.SERVING, pb.DRAINING):
        raise Unavailable(engine.waiting_for, retry_after=1.0)
    first = engine.infos[0]
    return pb.SchedulerInfo(
        model_path=first.model_path,
        vocab_size=first.vocab_size,
        max_model_len=limits.max_request_len,
        max_num_seqs=limits.num_slots,
        max_queue_len=limits.max_queue_len,
        drafter=first.drafter,
        max_draft_tokens=first.max_draft_tokens,
        eos_token_ids=first.eos_token_ids,
        dtype=first.dtype,
        device=first.device,
        block_size=first.block_size,
        num_blocks=first.num_blocks,
        model_fingerprint=first.model_fingerprint,
        max_pooled_len=limits.max_pooled_len,
        hidden_size=first.hidden_size,
        headless=first.headless,
        drafter_fault=first.drafter_fault,
        grammar_fault=first.grammar_fault,
        drafts_because=first.drafts_because,
        speculative_config=first.speculative_config,
        defaults=first.defaults,
        draining=engine.engine_state == pb.DRAINING,
        weight_version=first.weight_version,
        adapters=engine.adapters.loaded,
        max_loras=first.max_loras,
        loads_adapters=engine.adapters.loads,
    )


async def status(engine: Engine, address: str, num_steps: int = 0) -> pb.SchedulerStatus:
    """Return what scheduler, supervisors and ranks answer about themselves, and steps."""
    state, supervisors = engine.state, await engine.supervisors.statuses(_TIMEOUT_S)
    asked = state.asked_for if state else []
    return pb.SchedulerStatus(
        pid=os.getpid(),
        address=address,
        state=engine.engine_state,
        epoch=state.epoch if state else 0,
        step=state.applied_step if state else 0,
        last_step_age_s=engine.age_s(engine.monitor.last_step_at),
        last_token_age_s=engine.age_s(engine.monitor.last_token_at),
        waiting_for=engine.waiting_for,
        supervisors=supervisors,
        ranks=await _ranks(engine.addresses(supervisors)),
        incidents=[_incident(engine, incident) for incident in engine.incidents.latest],
        num_open_requests=len(asked),
        num_replaying_requests=sum(seq.is_replaying for seq in asked),
        recent_steps=_recent(engine, num_steps) if num_steps else None,
    )


def _recent(engine: Engine, num_steps: int) -> pb.RecentSteps:
    steps, now = engine.monitor.recent.latest(num_steps), engine.clock()
    return pb.RecentSteps(
        epoch=[step.epoch for step in steps],
        step=[step.step for step in steps],
        age_s=[now - step.ended_at for step in steps],
        took_s=[step.took_s for step in steps],
        prompt_rows=[step.prompt_rows for step in steps],
        decode_rows=[step.decode_rows for step in steps],
        verify_rows=[step.verify_rows for step in steps],
        num_emitted=[step.num_emitted for step in steps],
        num_accepted=[step.num_accepted for step in steps],
    )


def _incident(engine: Engine, incident: Incident) -> pb.Incident:
    return pb.Incident(
        cause=incident.cause,
        reason=incident.reason,
        epoch=incident.epoch,
        age_s=engine.age_s(incident.noticed_at),
        detect_s=incident.detect_s,
        recover_s=incident.recover_s or 0.0,
        num_replayed_requests=incident.replay.num_requests,
        num_replayed_tokens=incident.replay.num_tokens,
        num_kept_tokens=incident.num_kept,
    )


async def _ranks(addresses: list[str]) -> Sequence[worker_pb2.WorkerInfo]:
    group = WorkerGroup(addresses)
    try:
        return await group.infos(_TIMEOUT_S)
    except SurestepError:
        return ()
    finally:
        await group.close()


def _drafting(speculation: Speculation) -> list[pb.DraftingValue]:
    return [
        pb.DraftingValue(
            source=name,
            rows=size.rows,
            value=size.value,
            drafts=size.drafts,
            time_factor=size.time,
            num_trials=size.num_trials,
        )
        for name, source in speculation.sources.items()
        for size in source.contest.standings()
    ]


def stats(engine: Engine) -> pb.SchedulerStats:
    """Return counters since the start of the process; all zero before the workers were reached."""
    if engine.state is None:
        return pb.SchedulerStats(pause=engine.pauses.info)
    told = _stats(engine, engine.state)
    if engine.log is not None:
        told.num_kv_event_batches = engine.log.num_batches
        told.num_kv_event_batches_dropped = engine.log.num_dropped
    return told


def _stats(engine: Engine, state: SchedulerState) -> pb.SchedulerStats:
    asked = state.asked_for
    num_running = sum(seq.tenancy is not None for seq in asked)
    counters, incidents, monitor = state.counters, engine.incidents, engine.monitor
    first = engine.infos[0] if engine.infos else worker_pb2.WorkerInfo()
    return pb.SchedulerStats(
        num_running=num_running,
        num_waiting=len(asked) - num_running + engine.adapters.num_waiting,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens - counters.canary_tokens,
        num_prompt_tokens_cached=counters.prompt_tokens_cached,
        num_step_tokens=counters.step_tokens,
        num_steps_by_tokens=counters.steps_by_tokens,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        num_snapshot_queries=counters.snapshot_queries,
        num_snapshot_hits=counters.snapshot_hits,
        num_snapshots_taken=counters.snapshots_taken,
        num_snapshot_evictions=counters.snapshot_evictions,
        speculation_suspended=state.speculation.alarm.suspended,
        num_speculation_suspensions=state.speculation.alarm.num_suspensions,
        drafting=_drafting(state.speculation),
        num_preemptions=counters.preemptions,
        num_drafts=counters.num_drafts,
        num_draft_tokens=counters.draft_tokens,
        num_accepted_tokens=counters.accepted_tokens,
        num_accepted_tokens_per_pos=counters.accepted.at_least(),
        num_rejected_requests=state.waiting.num_refused,
        num_steps=counters.steps,
        num_epochs=counters.epochs,
        num_replayed_requests=counters.replayed_requests,
        num_step_deadlines_exceeded=monitor.num_deadlines_exceeded,
        num_aborted_requests=counters.aborted_requests,
        finished_requests=counters.finished,
        step_time_p50_s=monitor.timer.recent_s.quantile(0.5),
        step_time_p99_s=monitor.timer.recent_s.quantile(0.99),
        step_gap_p50_s=monitor.gaps_s.quantile(0.5),
        step_gap_p99_s=monitor.gaps_s.quantile(0.99),
        num_check_draft_tokens=first.check_drafts,
        num_check_accepted_tokens=first.check_accepted,
        drafter_broken=bool(first.drafter_fault),
        num_incidents={cause.value: incidents.by_cause[cause] for cause in Cause},
        detect_s_sum=incidents.detect_s,
        recover_s_sum=incidents.recover_s,
        num_recoveries=incidents.num_recoveries,
        num_replayed_tokens=incidents.replayed_tokens,
        num_fenced_messages=counters.fenced_messages,
        num_drafter_faults=counters.drafter_faults,
        num_poisoned_requests=counters.poisoned_requests,
        num_canaries=counters.canaries,
        last_token_age_s=engine.age_s(monitor.last_token_at),
        num_queued_tokens=sum(len(seq.tokens) for seq in asked if seq.tenancy is None),
        num_tenants=len({seq.tenant.index for seq in asked}),
        num_displacements=counters.displacements,
        steps=_steps(counters, monitor.times),
        pause=engine.pauses.info,
        adapters=_adapters(engine, asked),
        **_room(state),
        **_tiers(counters),
    )


def _adapters(engine: Engine, asked: Sequence[TokenSequence]) -> list[pb.AdapterLoad]:
    """Return the requests of each adapter, what is given up included."""
    places = Counter(
        (seq.request.adapter.place, seq.tenancy is not None)
        for seq in asked
        if seq.request.adapter is not None
    )
    return [
        pb.AdapterLoad(
            name=adapter.name,
            digest=adapter.digest,
            leaving=bool(leaving),
            num_running=places[adapter.place, True],
            num_waiting=places[adapter.place, False],
        )
        for leaving, adapters in enumerate((engine.adapters.loaded, engine.adapters.leaving))
        for adapter in adapters
    ]


def _room(state: SchedulerState) -> dict[str, int]:
    """Blocks, slots and snapshots: how many there are, and what of them is taken."""
    pool, snapshots, num_slots = state.pool, state.snapshots.pool, state.limits.num_slots
    return {
        "num_blocks_total": pool.num_blocks - 1,
        "num_blocks_used": pool.num_used,
        "num_blocks_cached": pool.num_available - pool.num_free,
        "num_slots_total": num_slots,
        "num_slots_used": num_slots - len(state.free_slots),
        "num_snapshots_total": snapshots.num_blocks - 1,
        "num_snapshots_held": snapshots.num_blocks - 1 - snapshots.num_free,
    }


def _tiers(counters: Counters) -> dict[str, int]:
    """Use of the tiers behind the blocks."""
    return {
        "num_tier_queries": counters.tier_queries,
        "num_tier_hits": counters.tier_hits,
        "num_tier_stored_blocks": counters.tier_stored,
        "num_prompt_tokens_loaded": counters.prompt_tokens_loaded,
    }


def _steps(counters: Counters, times: StepTimes) -> pb.StepStats:
    steps, rows = counters.by_mode()
    return pb.StepStats(
        num_steps_by_mode=steps,
        num_rows_by_mode=rows,
        num_rows_by_k=counters.rows_by_k,
        num_windows_by_drafts=counters.drafted.counts.tolist(),
        num_windows_by_accepted=counters.accepted.counts.tolist(),
        num_checked_rows=counters.checked_rows,
        num_checked_digests=counters.checked_digests,
        plan_s=times.plan_s,
        apply_s=times.apply_s,
        bounds_s=BOUNDS_S,
        num_steps_within=times.num_within,
        step_s=times.step_s,
        ranks=[_rank(RankTimes(*total)) for total in times.by_rank.tolist()],
    )


def _rank(total: RankTimes) -> pb.RankSeconds:
    return pb.RankSeconds(
        queue_s=1e-6 * total.queue_us,
        prepare_s=1e-6 * (total.prepare_us - total.draft_us),
        draft_s=1e-6 * total.draft_us,
        forward_s=1e-6 * total.forward_us,
        verify_s=1e-6 * total.sample_us,
        bubble_s=1e-6 * total.gap_us,
    )
