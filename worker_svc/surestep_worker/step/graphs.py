"""Captured steps: on a CUDA device a step of a bucket's shape is one launch.

The kernels of a captured step read fixed addresses. All of them are written for every step, padding
included: nothing of an earlier step is left. Steps follow each other on one stream, and the outputs
of a step are read there before the next one begins; hence all graphs share their inputs and their
memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from surestep_common.errors import InternalError, InvalidRequest
from surestep_kernels.step_columns import HostColumn
from torch import Tensor

from .batch import Extras, Inputs, StepColumns
from .buckets import StepSize, find_bucket, in_order
from .forward import PassOutputs
from .transfer import InputBuffer, Layout, keep_pinned

logger = logging.getLogger(__name__)

_SHARE = 0.1  # of the time, at most, is spent on capturing
_MOST_FAILURES = 3  # each costs a pool; what fails so often is not the kind of step


class GraphKind(NamedTuple):
    """Kind of a graph: a whole step of a bucket, or the part of it that precedes the logits."""

    bucket: StepSize
    whole: bool  # serves steps that only choose tokens, from the logits as they are


Run = Callable[[StepColumns, GraphKind], PassOutputs]
Replay = Callable[[], PassOutputs]


class Graphs:
    """Captures steps. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        buckets: Sequence[StepSize],
        padding: Callable[[StepSize], StepColumns[HostColumn]],
        run: Run,
        device: torch.device,
    ) -> None:
        """Prepare to capture; `run` queues a kind of step that reads the given columns."""
        self._run, self._device = run, device
        paddings = {bucket: padding(bucket) for bucket in buckets}
        self._input_buffer = InputBuffer(paddings.values(), device)
        self._layouts = {b: Layout(tree, self._input_buffer.words) for b, tree in paddings.items()}
        self._ordered = in_order(buckets)
        self._captured: dict[GraphKind, Replay] = {}
        self._failed = set[GraphKind]()
        self._missed = Counter[GraphKind]()  # steps that would have used what is not captured
        self._rest_until = 0.0
        self.num_missed = 0  # steps that were launched kernel by kernel
        self._shared_bytes, self._own_bytes = 0, 0  # of the pool; of the largest graph
        on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        # One for all captures: the allocator keeps free memory by stream.
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def most_missed(self) -> GraphKind | None:
        """The kind that most steps would have used, of those that are not captured yet."""
        return next((kind for kind, _ in self._missed.most_common(1)), None)

    @property
    def due(self) -> int:
        """Return the number of the kind that steps have missed most, if it may be captured now;
        0: none is."""
        missed = self.most_missed
        resting = time.monotonic() < self._rest_until
        return 1 + self.kinds().index(missed) if missed is not None and not resting else 0

    def kind(self, number: int) -> GraphKind:
        """Return the kind of this number, from 1. Raises InvalidRequest if there is none."""
        kinds = self.kinds()
        if not 1 <= number <= len(kinds):
            raise InvalidRequest(f"{len(kinds)} kinds of step, and no {number}", param="capture")
        return kinds[number - 1]

    @property
    def footprint(self) -> int:
        """Estimate the bytes of device memory that all kinds take, from those that are captured.

        The memory that they share grows with the largest, the driver's with their number.
        """
        return self._shared_bytes + self._own_bytes * len(self.kinds())

    def find(self, size: StepSize | None, *, whole: bool) -> GraphKind | None:
        """Return what to replay for a step, None if it has to be launched kernel by kernel."""
        bucket = find_bucket(size, self._ordered) if size is not None else None
        found = None
        if bucket is not None:
            kind, part = GraphKind(bucket, whole), GraphKind(bucket, whole=False)
            if kind not in self._captured and kind not in self._failed:
                self._missed[kind] += 1
            found = next((one for one in (kind, part) if one in self._captured), None)
        self.num_missed += found is None
        return found

    def send(
        self, kind: GraphKind, columns: StepColumns[HostColumn], extras: Extras[HostColumn]
    ) -> Inputs[Tensor]:
        """Upload the inputs of a step that this kind is replayed for."""
        layout = self._layouts[kind.bucket]
        return layout.columns, self._input_buffer.send(layout, columns, extras)

    def replay(self, kind: GraphKind) -> PassOutputs:
        """Queue a captured kind. On the CPU it is run again, from the same addresses."""
        return self._captured[kind]()

    def warm_up(self, progress: Callable[[], None]) -> None:
        """Run every kind on padding, so that its kernels are compiled and loaded before capture."""
        for bucket, layout in self._layouts.items():
            layout.clear()
            self._run(layout.columns, GraphKind(bucket, whole=True))
            progress()
        keep_pinned(len(self._input_buffer.words), self._device)

    def capture_next(self) -> None:
        """Capture the kind that most steps have missed, else the largest that is left, if any.

        Waits until the device is idle: the results of all queued steps are on the host then.
        """
        kind = self._next()
        if kind is not None:
            self.capture(kind)

    def is_captured(self, kind: GraphKind) -> bool:
        return kind in self._captured

    def has_failed(self, kind: GraphKind) -> bool:
        """Return whether this kind will never be captured."""
        return kind in self._failed

    def capture(self, kind: GraphKind) -> bool:
        """Capture a kind; return whether it can be replayed now.

        A failure is logged, and steps of this kind are launched kernel by kernel; after some, all
        that are not captured by then. Raises what the device says if it does not work any more.
        """
        began = time.monotonic()
        del self._missed[kind]
        layout = self._layouts[kind.bucket]
        try:
            self._captured[kind] = self._capture(lambda: self._run(layout.columns, kind))
        except Exception:
            self._failed.add(kind)
            logger.exception("steps of %s are not captured", kind)
            self._renounce_pool()
            if len(self._failed) >= _MOST_FAILURES:
                logger.error("no more steps are captured, after %d failures", _MOST_FAILURES)
                self._failed.update(k for k in self.kinds() if k not in self._captured)
                self._missed.clear()
        ended = time.monotonic()
        self._rest_until = ended + (ended - began) * (1 / _SHARE - 1)
        logger.debug("captured %s in %.3f s", kind, ended - began)
        return kind in self._captured

    def drop(self, kind: GraphKind) -> None:
        """Launch steps of this kind kernel by kernel from now on."""
        self._captured.pop(kind, None)
        del self._missed[kind]
        self._failed.add(kind)

    def kinds(self) -> list[GraphKind]:
        """Return all kinds, the largest first, whole steps before parts."""
        return [GraphKind(bucket, whole) for whole in (True, False) for bucket in self._layouts]

    def _next(self) -> GraphKind | None:
        if (missed := self.most_missed) is not None:
            return missed
        done = self._captured.keys() | self._failed
        # Parts of steps serve requests that shape the logits or score tokens, if there are any.
        parts = any(not kind.whole for kind in done)
        left = (kind for kind in self.kinds() if kind not in done and (kind.whole or parts))
        return next(left, None)

    def _capture(self, run: Callable[[], PassOutputs]) -> Replay:
        if self._stream is None:
            return _into_place(run)
        # Not torch.cuda.graph(), which releases all free memory, the host's too, and collects
        # garbage: the steps that follow would have to allocate again.
        torch.cuda.current_stream(self._device).synchronize()
        free, reserved = self._memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may allocate and wait during the capture, which records this one alone.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                queued = run()
            finally:
                graph.capture_end()
        if queued.drafter_failed:
            raise InternalError("the drafter failed while a step was captured")
        left, held = self._memory()
        self._shared_bytes += held - reserved
        self._own_bytes = max(self._own_bytes, free - left - (held - reserved))

        def replay() -> PassOutputs:
            graph.replay()
            return queued

        return replay

    def _renounce_pool(self) -> None:
        """Share another pool from now on. Raises what the device says if its context is lost.

        Until 2.12, torch lets the allocator go on recording to the pool of a capture that could not
        be ended: no other could begin with that pool, and no memory be released.
        """
        if self._stream is None or self._pool is None:
            return
        torch.cuda.synchronize(self._device)
        with contextlib.suppress(RuntimeError):  # it is not recording
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()

    def _memory(self) -> tuple[int, int]:
        """Return the bytes of the device that are free, and those that the allocator holds."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free, torch.cuda.memory_reserved(self._device)


def _into_place(run: Callable[[], PassOutputs]) -> Replay:
    """Stand in for a replay on the CPU: every run leaves its outputs where the first one did."""
    first = list[PassOutputs]()

    def replay() -> PassOutputs:
        queued = run()
        if not first:
            first.append(queued)
        _overwrite(first[0], queued)
        return first[0]._replace(drafter_failed=queued.drafter_failed)

    return replay


def _overwrite(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        if target is not source:
            target.copy_(source)
    elif isinstance(target, tuple):
        for into, part in zip(target, source, strict=True):
            _overwrite(into, part)
