"""The parts of a draw in C: noise and mass to the last bit, and a bound that forgets no token."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from ctypes import CDLL, c_float, c_long, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from surestep_kernels.choose import gumbel_noise, mass_of
from surestep_kernels.columns.cpu.compiling import FLAGS, SHARED, SOURCES, THIS_PROCESSOR
from torch import Tensor

HARNESS = """
#include "choose/draw.c"

void noise(float *out, const int32_t *ids, long n, long low, long high, long position)
{
    const noise_key key = key_of((uint32_t)low, (uint32_t)high, (int32_t)position);
    for (long i = 0; i < n; i++) out[i] = noise_of(hash8((i8x){ids[i]}, key)[0]);
}

void noise_of_hashes(float *out, const int32_t *hashes, long n)
{
    for (long i = 0; i < n; i++) out[i] = noise_of(hashes[i]);
}

/* [n], a multiple of 8 */
void may_reach(int32_t *out, const int32_t *hashes, const float *gaps, long n, float best)
{
    for (long i = 0; i < n; i += 8) {
        i8x hash, may;
        memcpy(&hash, hashes + i, sizeof hash);
        may = may_reach8(hash, load8(gaps, i, F32), best);
        memcpy(out + i, &may, sizeof may);
    }
}

void mass(int64_t *out, const float *gaps, long n)
{
    for (long i = 0; i < n; i++) {
        const ul4 sum = mass8((f8){gaps[i]}, (i8x){-1});
        out[i] = (int64_t)(sum[0] + sum[1] + sum[2] + sum[3]);
    }
}
"""
SIGNATURES: dict[str, list[Any]] = {
    "noise": [c_void_p, c_void_p, c_long, c_long, c_long, c_long],
    "noise_of_hashes": [c_void_p, c_void_p, c_long],
    "may_reach": [c_void_p, c_void_p, c_void_p, c_long, c_float],
    "mass": [c_void_p, c_void_p, c_long],
}


def compile_harness(folder: Path, *flags: str) -> dict[str, Callable[..., None]]:
    source, library = folder / "harness.c", folder / "harness.so"
    source.write_text(HARNESS)
    folders = f"-I{SOURCES}", f"-I{SHARED}"
    command = ["cc", *FLAGS, *flags, *folders, "-o", str(library), str(source), "-lm"]
    subprocess.run(command, check=True)
    opened = CDLL(str(library))
    functions = dict[str, Callable[..., None]]()
    for name, arguments in SIGNATURES.items():
        function = getattr(opened, name)
        function.argtypes, function.restype = arguments, None
        functions[name] = function
    return functions


@pytest.fixture(scope="module", params=["this processor", "any processor"])
def parts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[..., None]]:
    """Compiled for this processor's instructions, and for those that all processors have."""
    flags = (THIS_PROCESSOR,) if request.param == "this processor" else ()
    folder = tmp_path_factory.mktemp("harness")
    return compile_harness(folder, *flags)


def noise_of(parts: dict[str, Callable[..., None]], hashes: Tensor) -> Tensor:
    out = torch.empty(len(hashes))
    parts["noise_of_hashes"](out.data_ptr(), hashes.data_ptr(), len(hashes))
    return out


def test_noise_is_that_of_the_reference(parts: dict[str, Callable[..., None]]) -> None:
    ids = torch.randint(1 << 18, (20_000,), dtype=torch.int32)
    for seed, position in ((0, 0), (-1, 1), (0x1234_5678_9ABC_DEF0, (1 << 31) - 1)):
        out = torch.empty(len(ids))
        halves = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
        parts["noise"](out.data_ptr(), ids.data_ptr(), len(ids), *halves, position)
        expected = gumbel_noise(ids.long(), torch.tensor([seed]), torch.tensor([position]))
        assert torch.equal(out, expected[0])


def test_the_bound_admits_whatever_may_win(parts: dict[str, Callable[..., None]]) -> None:
    """And hardly anything else: least margins, random ones, and the ends of the hash."""
    last = torch.arange((1 << 31) - 4096, 1 << 31, dtype=torch.int64).int()
    hashes = torch.cat((last, torch.randint(-(1 << 31), 1 << 31, (60_000,)).int()))
    hashes = hashes[: len(hashes) // 8 * 8]
    noise = noise_of(parts, hashes)
    for best in (-math.inf, -3.1, 0.0, 0.7, 5.0, 20.0):
        reach = noise - best if math.isfinite(best) else torch.rand(len(noise)) * 30
        for margin in (0.0, 1e-3, 0.1, 5.0):
            gap = (reach - margin).clamp(min=0)  # where it is not clamped, the score is the best
            out = torch.empty(len(hashes), dtype=torch.int32)
            parts["may_reach"](out.data_ptr(), hashes.data_ptr(), gap.data_ptr(), len(hashes), best)
            wins = noise - gap >= best
            assert (out[wins] != 0).all()
    gap, out = torch.zeros(len(hashes)), torch.empty(len(hashes), dtype=torch.int32)
    parts["may_reach"](out.data_ptr(), hashes.data_ptr(), gap.data_ptr(), len(hashes), 8.0)
    assert (out[len(last) :] != 0).sum() < 60_000 * math.exp(-8.0) * 1.2 + 20


def test_mass_is_that_of_the_reference(parts: dict[str, Callable[..., None]]) -> None:
    bits = torch.arange(0, 0x41F00000, 9973, dtype=torch.int32)  # up to 30
    gaps = torch.cat((bits.view(torch.float32), torch.tensor([math.inf, 3e38, 1e-45, 29.0])))
    out = torch.empty(len(gaps), dtype=torch.int64)
    parts["mass"](out.data_ptr(), gaps.data_ptr(), len(gaps))
    assert torch.equal(out, mass_of(gaps))
