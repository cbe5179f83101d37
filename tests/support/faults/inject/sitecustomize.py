"""Faults that no signal can cause: Python imports this at the start of each process under test.

Methods of the worker are wrapped as their modules are imported. A wrapped method looks for a file
named after its place and its rank (`forward-0`) in the folder that FAULT_TRIGGERS names; the file
says what to do, in JSON, and is gone before it is done: one trigger, one fault. One with a "token"
waits for the first forward pass over that token, one with "row" for one in which some sequence has
so many tokens, which a prompt has and no drafts are; one with "but" is not for the process with that
id. Those of a layer and of a collective are looked
for within the model's forward pass only, not within its drafter's. The product knows nothing of
this. A method that is no longer there ends the process with an AttributeError.

FAULT_PACE_S seconds are added to every forward pass: tiny models are done before a client on a busy
machine has seen half of their tokens, and a fault would find nobody. A forward pass over the token
FAULT_FATAL_TOKEN ends the process, each time: the request whose prompt has it is what does it.

With FAULT_DEVICE_S steps stay on their device, as on a GPU, which has them done after as many
seconds: the host sees neither drafts nor lengths before, and the next step is launched meanwhile.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(os.environ.get("FAULT_TRIGGERS", "."))
RANK = os.environ.get("SURESTEP_RANK", "0")
PACE_S = float(os.environ.get("FAULT_PACE_S", "0"))
FATAL_TOKEN = int(os.environ.get("FAULT_FATAL_TOKEN", "-1"))
DEVICE_S = float(os.environ.get("FAULT_DEVICE_S", "0"))

WITHIN_FORWARD = ("layers", "collective")
IN_FORWARD = threading.Event()  # the step thread is there

Order = dict[str, Any]
Method = Callable[..., Any]


def ordered(place: str, tokens: Sequence[int] = (), longest: int = 0) -> Order:
    """The order for this place, taken away; empty when there is none, or none for these tokens, of
    which the longest row has so many."""
    path = FOLDER / f"{place}-{RANK}"
    if not path.exists():  # that takes no descriptor: a process without any goes on
        return {}
    try:
        order: Order = json.loads(path.read_text())
        if order.get("but") == os.getpid() or longest < order.get("row", 0):
            return {}
        if "token" in order and order["token"] not in tokens:
            return {}
        path.unlink()
    except FileNotFoundError:
        return {}
    return order


def suffer(order: Order) -> None:
    """Go wrong before a method has done anything."""
    match order.get("do"):
        case "kill":
            os.kill(order["pid"] or os.getpid(), signal.SIGKILL)
        case "raise":
            raise RuntimeError("a fault of the test suite")
        case "memory":
            bytearray(1 << 62)  # MemoryError
        case "allocate":
            sys.modules["torch"].empty(1 << 50)  # RuntimeError of torch's allocator
        case "sleep":
            time.sleep(order["s"])
        case "hold-the-lock":  # PyDLL does not let go of the interpreter
            ctypes.PyDLL(None).usleep(int(1e6 * order["s"]))
        case "compute":  # as a kernel does: without the interpreter
            ctypes.CDLL(None).usleep(int(1e6 * order["s"]))


def spoil(order: Order, answer: Any) -> Any:
    """Spoil what a method returns: a tensor [N, ...], or drafts."""
    match order.get("do"):
        case "nan":
            answer[: order.get("rows")] = float("nan")
        case "garbage":
            answer.ids[:] = 1 << 30
            answer.counts[:] = 1
        case "stay":
            ctypes.CDLL(None).usleep(int(1e6 * order["s"]))
    return answer


def wrap(owner: type | ModuleType, name: str, place: str) -> None:
    """Put a place of faults around a method."""
    method: Method = getattr(owner, name)

    def faulty(*arguments: Any, **named: Any) -> Any:
        if place in WITHIN_FORWARD and not IN_FORWARD.is_set():
            return method(*arguments, **named)
        order = ordered(place)
        suffer(order)
        if order.get("do") == "skip":
            return arguments[1]  # as it was given
        return spoil(order, method(*arguments, **named))

    setattr(owner, name, faulty)


def wrap_forward(owner: type) -> None:
    """Put faults around the model's forward pass, and make it slow."""
    method: Method = owner.forward  # type: ignore[attr-defined]

    def faulty(self: Any, batch: Any, caches: Any) -> Any:
        time.sleep(PACE_S)
        tokens = batch.token_ids.tolist()
        if FATAL_TOKEN in tokens:
            os.abort()
        rows = batch.groups[0].rows.cu_rows.diff()
        order = ordered("forward", tokens, int(rows.max()))
        suffer(order)
        IN_FORWARD.set()
        try:
            return method(self, batch, caches)
        finally:
            IN_FORWARD.clear()

    owner.forward = faulty  # type: ignore[attr-defined]


class FaultyContext:
    """A gRPC context whose messages may get lost, come twice, late, or from another time."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, result: Any) -> None:
        """Write a StepResult, or not."""
        order = ordered("result")
        suffer(order)
        match order.get("do"):
            case "drop":
                return
            case "duplicate":
                await self._context.write(result)
            case "late":
                import asyncio

                await asyncio.sleep(order["s"])
            case "stale":
                old = type(result)()
                old.CopyFrom(result)
                old.epoch -= 1
                await self._context.write(old)
        await self._context.write(result)


def _patch_service(module: ModuleType) -> None:
    run: Method = module.WorkerService.Run

    async def faulty(self: Any, plans: Any, context: Any) -> None:
        await run(self, plans, FaultyContext(context))

    module.WorkerService.Run = faulty


def _methods(owner: str, **places: str) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        for name, place in places.items():
            wrap(getattr(module, owner), name, place)

    return patch


def _patch_preload(module: ModuleType) -> None:
    wrap(module, "import_all", "import")


def _patch_build(module: ModuleType) -> None:
    wrap(module, "load_model", "load")


def _patch_kernels(module: ModuleType) -> None:
    load: Method = module.load_kernels

    def of_device(*arguments: Any, **named: Any) -> Any:
        from dataclasses import replace

        kernels = load(*arguments, **named)
        return replace(kernels, step=replace(kernels.step, synchronous=not DEVICE_S))

    module.load_kernels = of_device  # type: ignore[attr-defined]


def _patch_download(module: ModuleType) -> None:
    begin: Method = module.Download.__init__

    def faulty(self: Any, packed: Any) -> None:
        begin(self, packed)
        self.arrives = time.monotonic() + DEVICE_S

    def wait(self: Any) -> None:
        time.sleep(max(0.0, self.arrives - time.monotonic()))

    module.Download.__init__, module.Download.wait = faulty, wait
    module.Download.arrived = property(lambda self: time.monotonic() >= self.arrives)


def _patch_decoder(module: ModuleType) -> None:
    wrap_forward(module.Decoder)
    wrap(module.Decoder, "logits", "logits")


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "surestep_worker.process.preload": _patch_preload,
    "surestep_worker.startup.build": _patch_build,
    "surestep_worker.startup.choose_kernels": _patch_kernels,
    "surestep_worker.step.transfer": _patch_download,
    "surestep_worker.process.service": _patch_service,
    "surestep_worker.distributed.tensor_parallel": _methods(
        "TensorParallel", all_reduce="collective"
    ),
    "surestep_worker.layers.decoder_layer": _methods("LayerStack", __call__="layers"),
    "surestep_worker.layers.decoder": _patch_decoder,
    "surestep_worker.layers.draft_head": _methods("MtpHead", forward="head"),
    "surestep_worker.drafters.ngram": _methods("NgramDrafter", propose="propose"),
    "surestep_worker.drafters.head": _methods("HeadSteps", draft="propose"),
}


class PatchOnImport(importlib.abc.MetaPathFinder):
    """Finds the modules of PATCHES where they are, and patches them when they have been run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for every other module."""
        patch = PATCHES.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None, f"{name} is not where it was"
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, PatchOnImport())
