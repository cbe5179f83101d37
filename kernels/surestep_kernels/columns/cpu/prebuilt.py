"""Prebuilt C kernels, as images have them, and which of them runs on a processor.

There is a target for every choice of instructions that the sources make (`#if` in cpu/), so that
results equal those of a library compiled on this very processor. The name of a library contains a
digest of its sources and flags, so one built from other sources is never found.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from .compiling import made_from, processor_features

logger = logging.getLogger(__name__)

PREBUILT = Path(__file__).parent / "prebuilt"
_V3 = frozenset(
    {"abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "pni"}
    | {"popcnt", "sse4_1", "sse4_2", "ssse3", "xsave"}
)
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")


@dataclass(frozen=True, slots=True)
class Target:
    """The processors that one library runs on."""

    name: str
    flags: tuple[str, ...]
    needs: Set[str]  # features, as Linux spells them

    def file(self, folder: Path) -> Path:
        """Return the path of the library built from the current sources."""
        return folder / f"{self.name}-{made_from(*self.flags)}.so"


TARGETS: dict[str, tuple[Target, ...]] = {  # of each machine the best first
    "x86_64": (
        Target("x86-64-v4-bf16", (*_VNNI_FLAGS, "-mavx512bf16"), _VNNI | {"avx512_bf16"}),
        Target("x86-64-v4-vnni", _VNNI_FLAGS, _VNNI),
        Target("x86-64-v4", ("-march=x86-64-v4",), _V4),
        Target("x86-64-v3", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Target("armv8-a", ("-march=armv8-a",), frozenset({"asimd", "fp"})),),
}


def fitting(machine: str, features: Set[str]) -> tuple[Target, ...]:
    """Return the targets that run on a processor with these features, best first."""
    return tuple(target for target in TARGETS.get(machine, ()) if target.needs <= features)


def load_prebuilt(folder: Path) -> bytes | None:
    """Return the best library in `folder` for this processor, or None. Raises OSError."""
    for target in fitting(platform.machine(), set(processor_features().split())):
        file = target.file(folder)
        if file.is_file():
            logger.info("C kernels compiled ahead for %s", target.name)
            return file.read_bytes()
    return None


def why_no_prebuilt(folder: Path) -> str:
    """Explain why `load_prebuilt` found no library."""
    targets = TARGETS.get(platform.machine(), ())
    there = [target for target in targets if target.file(folder).is_file()]
    if not there:
        return "no kernels were compiled ahead"
    missing = there[-1].needs - set(processor_features().split())
    return (
        f"those compiled ahead need {there[-1].name} at least: this processor lacks "
        f"{', '.join(sorted(missing))}"
    )
