"""Captured passes: on a CUDA device a step of a bucket's shape is one launch.

The kernels of a captured pass read fixed addresses, so that each step writes all of its inputs
there, padding included: nothing of an earlier step is left. Steps follow each other on one stream,
and what a pass leaves is read before the next one begins; hence all graphs share their memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .buckets import Bucket
from .forward import PassInputs, PassOutputs, PassShape
from .upload import Sent

logger = logging.getLogger(__name__)

Run = Callable[[PassInputs, PassShape], PassOutputs]


class _Captured(NamedTuple):
    words: Tensor  # i32, all inputs of the pass
    replay: Callable[[], PassOutputs]


class Graphs:
    """Passes by bucket. On the CPU a pass is run instead of replayed, from the same addresses."""

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device
        self._captured: dict[Bucket, _Captured] = {}
        on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        # One for all: the allocator keeps what is free by stream.
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    @property
    def buckets(self) -> list[Bucket]:
        """Those that have been captured."""
        return list(self._captured)

    def capture(self, bucket: Bucket, example: Sent[PassInputs], shape: PassShape) -> None:
        """Capture a pass; `example` holds inputs of nothing but padding, and is kept."""
        began = time.perf_counter()
        capture = self._capture_graph if self._pool is not None else self._capture_call
        self._captured[bucket] = _Captured(example.words, capture(example.tree, shape))
        seconds = time.perf_counter() - began
        logger.debug("captured %d rows of %d tokens in %.2f s", *bucket, seconds)

    def replay(self, bucket: Bucket, words: Tensor) -> PassOutputs:
        """Run the bucket's pass on inputs that are laid out as those of its example."""
        captured = self._captured[bucket]
        captured.words.copy_(words)
        return captured.replay()

    def _capture_call(self, inputs: PassInputs, shape: PassShape) -> Callable[[], PassOutputs]:
        return lambda: self._run(inputs, shape)

    def _capture_graph(self, inputs: PassInputs, shape: PassShape) -> Callable[[], PassOutputs]:
        """Run once outside: kernels are compiled and loaded then, which no graph can hold.

        Other threads may allocate and wait meanwhile: only this one's doing is captured.
        """
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._run(inputs, shape)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            outputs = self._run(inputs, shape)

        def replay() -> PassOutputs:
            graph.replay()
            return outputs

        return replay
