"""Open the tiers behind a rank's blocks, as the settings ask for them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from surestep_common.errors import InvalidRequest
from surestep_common.releases import package_version
from surestep_kernels import KernelSet
from surestep_proto import worker_pb2 as pb

from surestep_worker.config import WorkerSettings
from surestep_worker.host.host_memory import GIB, OutOfMemory, free_memory
from surestep_worker.step.step import RankContext
from surestep_worker.tiers.entry import EntryForm
from surestep_worker.tiers.folder import FolderTier
from surestep_worker.tiers.host import HostTier
from surestep_worker.tiers.moves import Moves
from surestep_worker.tiers.stack import Stack
from surestep_worker.tiers.store import StoreTier, client_of
from surestep_worker.tiers.tier import Tier

from .built import Built


def check_tiers(settings: WorkerSettings) -> None:
    """Raise InvalidRequest for a folder that cannot be used, and without a client for the store."""
    if settings.kv_offloading_folder is not None:
        _check_folder(settings.kv_offloading_folder)
    if settings.kv_offloading_store is not None:
        client_of(settings.kv_offloading_store.get_secret_value())


def check_host(settings: WorkerSettings) -> None:
    """Raise OutOfMemory if the host has not the memory that was set."""
    wanted, room = settings.kv_offloading_size / settings.tensor_parallel_size, free_memory()
    if wanted * GIB > room.nbytes:
        message = f"--kv-offloading-size: {wanted:.2f} GiB on each rank, but only {room}"
        raise OutOfMemory(message, param="kv_offloading_size")


def open_tiers(built: Built, settings: WorkerSettings, kernels: KernelSet) -> None:
    """Give a rank its tiers, and name them among its facts."""
    if not settings.has_tiers:
        return
    context, facts = built.runner.context, built.facts

    def stack() -> Stack:
        return _stack(settings, EntryForm.of(computed_as(context, facts, kernels)))

    moves = Moves(context.caches, stack)
    built.runner.moves = moves
    places = {
        "host": settings.kv_offloading_size > 0,
        "folder": settings.kv_offloading_folder is not None,
        "store": settings.kv_offloading_store is not None,
    }
    facts.tiers.extend(name for name, there in places.items() if there)


def computed_as(context: RankContext, facts: pb.WorkerInfo, kernels: KernelSet) -> str:
    """Return all that decides the bytes of a block under its key, but for the number of blocks."""
    kv, recurrent = context.caches.kv, context.caches.recurrent
    drafts = json.loads(facts.speculative_config or "{}")
    device = facts.device
    if device.startswith("cuda"):
        device = torch.cuda.get_device_name()
    return repr(
        (
            facts.model_fingerprint,
            (drafts.get("method"), drafts.get("model"), list(facts.draft_layers)),
            (context.tp.rank, context.tp.size),
            kv.spec,
            [tuple(page.shape[1:]) for layer in kv.layers for page in layer.pages],
            recurrent.spec if recurrent is not None else None,
            (facts.prompt_chunk, facts.drafter_has_state),
            (kernels.name, kernels.linear_backend, device),
            (package_version(), torch.__version__, torch.backends.cpu.get_cpu_capability()),
        )
    )


def _stack(settings: WorkerSettings, form: EntryForm) -> Stack:
    near, far = None, list[Tier]()
    ranks = settings.tensor_parallel_size
    if settings.kv_offloading_size:
        near = HostTier(int(settings.kv_offloading_size * GIB / ranks))
    if settings.kv_offloading_folder is not None:
        most = int(settings.kv_offloading_folder_size * GIB)
        far.append(FolderTier(settings.kv_offloading_folder, most, form))
    if settings.kv_offloading_store is not None:
        url = settings.kv_offloading_store.get_secret_value()
        far.append(StoreTier(url, int(settings.kv_offloading_store_size * GIB), form))
    return Stack(form, near, far)


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"--kv-offloading-folder: {folder} cannot be used: {error.strerror}"
        raise InvalidRequest(message, param="kv_offloading_folder") from error
