"""The shares of models in one machine: how many are awake at once, and what each may take."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_common.gguf import is_gguf
from surestep_common.gguf.parts import part_files
from surestep_worker.host.host_memory import GIB, free_memory

from surestep_cli.settings.serve_settings import ServeSettings

_BESIDE_WEIGHTS = 640 << 20  # bytes of a rank with its standby, and of small caches
_SUFFIXES = (".safetensors", ".gguf")


class Demand(NamedTuple):
    """Memory that a model takes, in bytes and about."""

    name: str
    weights: int
    ranks: int
    stays: bool  # it is always awake

    @property
    def awake(self) -> int:
        return self.weights + self.ranks * _BESIDE_WEIGHTS


class Shares(NamedTuple):
    """Number of models awake at once, and whether the weights of all stay in memory."""

    most: int
    weights_stay: bool


def weight_bytes(path: Path) -> int:
    """Return the size of the files with a model's weights; 0 where they cannot be seen."""
    try:
        if is_gguf(path):
            return sum(part.stat().st_size for part in part_files(path))
        return sum(one.stat().st_size for one in path.iterdir() if one.suffix in _SUFFIXES)
    except OSError:
        return 0


def share_out(demands: Sequence[Demand], free: int, wanted: int | None) -> Shares:
    """Return how many models are awake at once: `wanted`, or as many as fit, whichever they are.

    Raise InvalidRequest where those that are always awake are more than that.
    """
    staying = [one for one in demands if one.stays]
    others = sorted((one.awake for one in demands if not one.stays), reverse=True)
    needed = sum(one.awake for one in staying)
    if len(demands) > 1 and needed > free:
        names = " and ".join(one.name for one in staying)
        raise InvalidRequest(
            f"{names} take about {needed / GIB:.1f} GiB, and {free / GIB:.1f} GiB are free: "
            "--load-on-demand has those awake that are asked for",
            param="models",
        )
    if wanted is not None and wanted < len(staying) + bool(others):
        raise InvalidRequest(
            f"--max-loaded-models {wanted}: {len(staying)} models are always awake"
            f"{', and the others need room for one' if others else ''}",
            param="max_loaded_models",
        )
    most = len(staying)
    for each in others:
        needed += each
        if needed > free and most > len(staying):
            break
        most += 1
    most = min(most, wanted or most)
    asleep = sum(one.weights for one in demands if not one.stays)
    return Shares(most, weights_stay=asleep + most * _BESIDE_WEIGHTS <= free)


def told(each: Sequence[ServeSettings], shares: Shares) -> Iterator[str]:
    """Yield what the user has to know of how several models share the machine."""
    if len(each) == 1:
        return
    cores, most = len(os.sched_getaffinity(0)), shares.most
    line = f"{len(each)} models, {most} awake at once"
    if any(one.device == "cpu" for one in each):
        part = "all" if most == 1 else f"1/{most}"
        yield f"{line}, with {max(1, cores // most)} of {cores} cores and {part} of the free memory"
    elif most > 1:
        yield f"{line}, with 1/{most} of --gpu-memory-utilization"
    else:
        yield line
    if not shares.weights_stay:
        yield "The weights of all do not fit into memory: what sleeps is loaded from disk again"


def with_shares(settings: ServeSettings, shares: Shares, most: int | None) -> ServeSettings:
    """Return the settings of one model with its share; what was set for it stays."""
    known = settings.model_fields_set
    changes: dict[str, int] = {}
    if "models_here" not in known and shares.most > 1:
        changes["models_here"] = shares.most
    if most is not None:
        changes["max_loaded_models"] = most
    if "unload_level" not in known and not shares.weights_stay:
        changes["unload_level"] = 2
    return settings.model_copy(update=changes) if changes else settings


def shared(
    each: Sequence[ServeSettings], names: Sequence[str], folders: Sequence[Path]
) -> tuple[Sequence[ServeSettings], Shares]:
    """Return the settings of all models with their shares. Raise InvalidRequest."""
    demands = [
        Demand(
            name,
            weight_bytes(folder),
            one.tensor_parallel_size,
            stays=not one.comes_and_goes,
        )
        for one, name, folder in zip(each, names, folders, strict=True)
    ]
    on_cpu = any(one.device == "cpu" for one in each)
    free = free_memory().nbytes if on_cpu else 1 << 60
    shares = share_out(demands, free, each[0].max_loaded_models)
    most = shares.most if shares.most < len(each) else None
    return [with_shares(one, shares, most) for one in each], shares
