"""CapturedStep steps: on a CUDA device a step of a bucket's shape is one launch.

The kernels of a captured step read fixed addresses, all of which are written for every step,
padding included: nothing of an earlier step is left. Steps follow each other on one stream, and
what a step leaves is read there before the next one begins; hence all graphs share their inputs and
their memory.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from surestep_common.errors import InternalError
from surestep_kernels.step.columns import HostColumn
from torch import Tensor

from surestep_worker.inputs.buckets import Bucket, StepSize, find_bucket, in_order
from surestep_worker.inputs.columns import StepColumns
from surestep_worker.inputs.download import Packed
from surestep_worker.inputs.upload import InputBuffer, Layout, keep_pinned

from .forward import PassOutputs

logger = logging.getLogger(__name__)

_SHARE = 0.1  # of the time, at most, goes into capturing while steps wait


class GraphKind(NamedTuple):
    """What is captured: of the whole step, or of all that comes before its logits."""

    bucket: Bucket
    whole: bool  # for steps that ask for nothing but tokens, drawn or not, from all of them


class Queued(NamedTuple):
    """What a step, or its captured part, leaves on the device."""

    outputs: PassOutputs
    packed: Packed | None  # for the host; None: the rest of the step is still to come


class CapturedStep(NamedTuple):
    """A step to be replayed. On the CPU it is run instead, from the same addresses."""

    layout: Layout
    replay: Callable[[], Queued]


Run = Callable[[StepColumns, GraphKind], Queued]


class Graphs:
    """CapturedStep steps. Not thread-safe: every call comes from the step thread."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        padding: Callable[[Bucket], StepColumns[HostColumn]],
        run: Run,
        device: torch.device,
    ) -> None:
        """Nothing is captured yet. `run` queues what a kind is made of, with its columns."""
        self._run, self._device = run, device
        paddings = {bucket: padding(bucket) for bucket in buckets}
        self.input_buffer = InputBuffer(paddings.values(), device)
        self._layouts = {b: Layout(tree, self.input_buffer.words) for b, tree in paddings.items()}
        self._ordered = in_order(buckets)
        self._captured: dict[GraphKind, CapturedStep] = {}
        self._failed = set[GraphKind]()
        self._missed = Counter[GraphKind]()  # how many steps would have used what is not captured
        self._rest_until = 0.0
        self.num_missed = 0  # steps that were launched kernel by kernel
        self._shared_bytes, self._own_bytes = 0, 0  # of the pool; of the graph that took most
        on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        # One for all: the allocator keeps what is free by stream.
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    @property
    def num_captured(self) -> int:
        """Kinds that are ready to be replayed."""
        return len(self._captured)

    @property
    def is_due(self) -> bool:
        """Whether steps have wanted a kind that may be captured now."""
        return bool(self._missed) and time.monotonic() >= self._rest_until

    @property
    def footprint(self) -> int:
        """Bytes of the device that all kinds take together, by those that are captured.

        What they share grows with the largest, what the driver keeps of each with their number.
        """
        return self._shared_bytes + self._own_bytes * len(self.kinds())

    def find(self, size: StepSize | None, *, plain: bool) -> CapturedStep | None:
        """What may be replayed for a step. None: it is launched kernel by kernel."""
        bucket = find_bucket(size, self._ordered) if size is not None else None
        captured = None
        if bucket is not None:
            kind = GraphKind(bucket, whole=plain)
            if kind not in self._captured and kind not in self._failed:
                self._missed[kind] += 1
            captured = self._captured.get(kind) or self._captured.get(
                GraphKind(bucket, whole=False)
            )
        self.num_missed += captured is None
        return captured

    def warm_up(self, progress: Callable[[], None]) -> None:
        """Run everything once, on padding: all is compiled and loaded then, as no graph can do."""
        for bucket, layout in self._layouts.items():
            layout.clear()
            self._run(layout.columns, GraphKind(bucket, whole=True))
            if (
                layout.columns.inputs.head is not None
            ):  # whose drafts a part restricts, which is more
                self._run(layout.columns, GraphKind(bucket, whole=False))
            progress()
        keep_pinned(len(self.input_buffer.words), self._device)

    def capture_next(self) -> None:
        """Capture the kind that most steps have wanted, else the largest that is left, if any.

        What has been queued is waited for: nothing is under way on the device meanwhile. Results
        that have not been asked for yet are on the host then.
        """
        kind = self._next()
        if kind is not None:
            self.capture(kind)

    def capture_missed(self) -> None:
        """All that steps have wanted."""
        while self._missed:
            self.capture_next()

    def capture(self, kind: GraphKind) -> bool:
        """Whether it can be replayed now. A failure is logged: such steps are launched singly."""
        began = time.monotonic()
        del self._missed[kind]
        layout = self._layouts[kind.bucket]
        try:
            replay = self._capture(lambda: self._run(layout.columns, kind))
            self._captured[kind] = CapturedStep(layout, replay)
        except Exception:
            self._failed.add(kind)
            logger.exception("steps of %s are not captured", kind)
        ended = time.monotonic()
        self._rest_until = ended + (ended - began) * (1 / _SHARE - 1)
        logger.debug("captured %s in %.3f s", kind, ended - began)
        return kind in self._captured

    def drop(self, kind: GraphKind) -> None:
        """Launch such steps singly after all."""
        self._captured.pop(kind, None)
        self._failed.add(kind)

    def kinds(self) -> list[GraphKind]:
        """All there may be, the largest first, whole steps before parts."""
        return [GraphKind(bucket, whole) for whole in (True, False) for bucket in self._layouts]

    def _next(self) -> GraphKind | None:
        if self._missed:
            return self._missed.most_common(1)[0][0]
        done = self._captured.keys() | self._failed
        # Parts of steps are for requests that restrict or shape what is drawn, if there are any.
        parts = any(not kind.whole for kind in done)
        left = (kind for kind in self.kinds() if kind not in done and (kind.whole or parts))
        return next(left, None)

    def _capture(self, run: Callable[[], Queued]) -> Callable[[], Queued]:
        if self._stream is None:
            return _into_place(run)
        # Not torch.cuda.graph(), which gives all free memory back, on the host too, and collects
        # garbage: the steps behind it would have to allocate again.
        torch.cuda.current_stream(self._device).synchronize()
        free, reserved = self._memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may allocate and wait meanwhile: only this one's doing is captured.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                queued = run()
            finally:
                graph.capture_end()
        if queued.outputs.failed:
            raise InternalError("the drafter failed while a step was captured")
        left, held = self._memory()
        self._shared_bytes += held - reserved
        self._own_bytes = max(self._own_bytes, free - left - (held - reserved))

        def replay() -> Queued:
            graph.replay()
            return queued

        return replay

    def _memory(self) -> tuple[int, int]:
        """Bytes of the device that are free, and that the allocator has."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free, torch.cuda.memory_reserved(self._device)


def _into_place(run: Callable[[], Queued]) -> Callable[[], Queued]:
    """Run instead of replayed: what a step leaves lies where that of the one before it lay."""
    first = list[Queued]()

    def replay() -> Queued:
        queued = run()
        if not first:
            first.append(queued)
        _overwrite(first[0], queued)
        return first[0]._replace(outputs=first[0].outputs._replace(failed=queued.outputs.failed))

    return replay


def _overwrite(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        if target is not source:
            target.copy_(source)
    elif isinstance(target, tuple):
        for into, part in zip(target, source, strict=True):
            _overwrite(into, part)
