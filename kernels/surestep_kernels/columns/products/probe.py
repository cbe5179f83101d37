"""Probe which products of a GPU have equal bits; the result decides the family that is used.

All tiles of linear/sequential.py are compared with one of them, at one row, two, one tile, one tile
and a row, and many; first rows and last ones, so that a row has other neighbours and another place.
Then the tiles that rows would get, at every border between them. Then cuBLAS, at every number of
rows it would be given. Quantised weights of each format are multiplied by instructions of all
widths and of the widest alone.

The weights are the model's own, multiplied by ordinary numbers. Results have 16 bits, which hides
most differences between sums of 32 bits. So there are also weights whose columns are repeated, for
inputs whose second half is the negated first: computed exactly, y is zero, so what remains are the
roundings of the sum. Their elements are of one size, of sizes up to 2**80 apart, or such that all
products are denormal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from surestep_common.config import variables
from torch import Tensor

from surestep_kernels.linear import PackedLinear, pack_linear_reference
from surestep_kernels.linear.sequential import (
    BORDERS,
    SERVED,
    TILES,
    Tile,
    multiply_into,
    sequential_linear,
)
from surestep_kernels.linear.splits import sum_partials
from surestep_kernels.linear.triton import ALL_WIDTHS, ONE_WIDTH, quantized_partials

from .families import MOST_PIECES, PIECE
from .probe_results import Identity, ProbeResult, Shape, sources_digest

_ROWS = BORDERS[-1] + 44  # beyond the last border, not a multiple of any tile
_MOST_COLUMNS = 16384  # of a weight, for tiles, whose columns are independent
_MOST_BYTES = 256 << 20  # of a weight, for cuBLAS, which must see all of it
_SHAPE = 96, 1040  # of the weights that are not the model's: a tail in every tile
_SEED_X, _SEED_WEIGHT, _SEED_WHOLE = 7, 8, 9

Numbers = Callable[[Tensor], Tensor]  # from normally distributed ones
NUMBERS: dict[str, Numbers] = {
    "ordinary": lambda z: z,
    "of all sizes": lambda z: z * 2.0 ** _whole(z, -40, 40),
    "tiny": lambda z: z * 2.0**-64,  # two of them have a denormal product
    "denormal": lambda z: z * 2.0**-128,
}
_PAIRS = (  # of weights and inputs
    ("ordinary", "ordinary"),
    ("of all sizes", "of all sizes"),
    ("tiny", "tiny"),
    ("of all sizes", "ordinary"),
    ("denormal", "ordinary"),
    ("ordinary", "denormal"),
)


class ProbeCase(NamedTuple):
    """A product to compare."""

    name: str
    x: Tensor
    packed: PackedLinear


def probe(
    weights: Sequence[PackedLinear],
    device: torch.device,
    go_on: Callable[[], bool],
    *,
    fp8_rows: bool = False,
) -> ProbeResult:
    """Compare all products; `go_on` is called between comparisons and may end the probe."""
    plain = [packed for packed in weights if packed.scales is None]
    quantised = [packed for packed in weights if packed.scales is not None]
    narrow = bool(quantised)
    for packed in quantised:
        if not go_on():
            return ProbeResult("", finished=False)
        narrow = narrow and not width_differences(packed, fp8_rows=fp8_rows)
    for case in probe_cases(plain, device):
        if not go_on():
            return ProbeResult("", narrow=narrow, finished=False)
        if unequal := differences(case):
            return ProbeResult(f"{case.name}: {unequal[0]}", narrow=narrow)
    cublas = set[Shape]()
    for packed in plain:
        if not go_on():
            return ProbeResult("", narrow=narrow, finished=False)
        if cublas_agrees(packed):
            cublas.add((packed.out_features, packed.in_features))
    return ProbeResult("", frozenset(cublas), narrow)


def identity(weights: Sequence[PackedLinear], device: torch.device) -> Identity:
    """Return everything that the result may depend on."""
    on_gpu = device.type == "cuda"
    here = Path(__file__)
    plain = "sequential", "plain", "splits"
    names = *plain, "triton", "weight_tile", "triton_fp8_rows"  # what multiplies
    linear = (here.parents[2] / "linear" / f"{name}.py" for name in names)
    sources = here, here.with_name("families.py"), *linear
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        "capability": list(torch.cuda.get_device_capability(device)) if on_gpu else [],
        "triton": triton.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cublas": variables("CUBLAS"),
        "sources": sources_digest(sources),
        "weights": sorted(
            [int(packed.format), packed.group_size, *packed.data.shape, packed.bias is not None]
            for packed in weights
        ),
    }


def probe_cases(
    weights: Sequence[PackedLinear], device: torch.device, rows: int = _ROWS
) -> Iterator[ProbeCase]:
    """Yield the cases, those common to all models first, so that a GPU fails at once."""
    drawn = _drawn(_SHAPE, _SEED_WEIGHT, device)
    for name, other in _PAIRS:
        weight = _twice(NUMBERS[name](drawn).to(SERVED))
        x = _inputs(rows, _SHAPE[1], device, NUMBERS[other])
        case = f"{name} weights by {other} numbers"
        yield ProbeCase(case, _cancelling(x), pack_linear_reference(weight))
    for packed in weights:
        kept = packed.data[:_MOST_COLUMNS]
        bias = None if packed.bias is None else packed.bias[: len(kept)]
        x = _inputs(rows, packed.in_features, device)
        case = "weight of {} by {}".format(*packed.data.shape)
        yield ProbeCase(case, x, pack_linear_reference(kept, bias))
        twice = pack_linear_reference(_twice(kept))
        yield ProbeCase(f"{case}, its columns twice", _cancelling(x), twice)


def differences(case: ProbeCase, tiles: Sequence[Tile] | None = None) -> list[str]:
    """Return the cases whose bits differ from those of the last tile at all rows."""
    x, packed = case.x, case.packed
    tiles = TILES if tiles is None else tiles
    want = _product(x, packed, tiles[-1])
    differs = {}
    for tile in tiles:
        for count in (1, 2, tile.rows, tile.rows + 1, len(x)):
            head = _differ(_product(x[:count], packed, tile), want[:count])
            tail = _differ(_product(x[-count:], packed, tile), want[-count:])
            differs[f"{count} rows by {tile}"] = head | tail
    for border in (1, *BORDERS):
        for count in (border, border + 1):
            got = sequential_linear(x[:count], packed)
            differs[f"{count} rows"] = _differ(got, want[:count])
    return _found(differs)


def cublas_agrees(packed: PackedLinear) -> bool:
    """Return whether cuBLAS gives the family's bits at all numbers of rows it would be given."""
    if packed.bias is not None or packed.data.nbytes > _MOST_BYTES:
        return False
    rows = [PIECE * pieces for pieces in range(1, MOST_PIECES + 1)]
    x = _inputs(rows[-1], packed.in_features, packed.data.device)
    twice = pack_linear_reference(_twice(packed.data))
    differs = []
    for inputs, weight in ((x, packed), (_cancelling(x), twice)):
        want = _product(inputs, weight, TILES[-1])
        for count in rows:
            got = torch.mm(inputs[:count], weight.data.T)
            differs.append(_differ(got, want[:count]))
    return not bool(torch.stack(differs).any())


def width_differences(
    packed: PackedLinear, *, fp8_rows: bool, most: int | None = None
) -> list[str]:
    """Return the products, of `most` rows at most, that get other bits by instructions of all
    widths than by the widest."""
    multiply = partial(quantized_partials, packed=packed, fp8_rows=fp8_rows)
    x = _inputs(most or _ROWS, packed.in_features, packed.data.device)
    counts = {1, 2, len(x), *(width + more for width in ALL_WIDTHS for more in (0, 1))}
    rows = {f"{count} rows": x[:count] for count in sorted(counts) if count <= len(x)}
    rows["small numbers"] = x * 2.0**-64
    differs = {}
    for (name, some), out_dtype in product(rows.items(), (torch.float32, None)):
        one, several = (
            sum_partials(multiply(some, out_dtype=out_dtype, widths=widths))
            for widths in (ONE_WIDTH, ALL_WIDTHS)
        )
        differs[f"{name} to {one.dtype}"] = _differ(one, several)
    return _found(differs)


def _product(x: Tensor, packed: PackedLinear, tile: Tile) -> Tensor:
    y = x.new_empty(len(x), packed.out_features)
    multiply_into(y, x, packed, tile)
    return y


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Return whether any bit differs, as a tensor on the device."""
    return (a.view(torch.int16) != b.view(torch.int16)).any()


def _found(differs: Mapping[str, Tensor]) -> list[str]:
    """Return the names of what differs. Waits for the GPU once."""
    found = torch.stack(list(differs.values())).tolist()
    return [name for name, is_other in zip(differs, found, strict=True) if is_other]


def _inputs(
    rows: int, depth: int, device: torch.device, numbers: Numbers = NUMBERS["ordinary"]
) -> Tensor:
    return numbers(_drawn((rows, depth), _SEED_X, device)).to(SERVED)


def _twice(weight: Tensor) -> Tensor:
    """Return the first half of columns [N, K / 2] twice; an odd one in the middle is zero."""
    half = weight.shape[1] // 2
    doubled = torch.zeros_like(weight)
    doubled[:, :half] = weight[:, :half]
    doubled[:, weight.shape[1] - half :] = weight[:, :half]
    return doubled


def _cancelling(x: Tensor) -> Tensor:
    """Return inputs whose product with `_twice` of any weight is zero, except for rounding."""
    doubled = _twice(x)
    doubled[:, x.shape[1] - x.shape[1] // 2 :] *= -1
    return doubled


def _drawn(shape: tuple[int, int], seed: int, device: torch.device) -> Tensor:
    """Return normally distributed numbers, always the same ones."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def _whole(like: Tensor, low: int, high: int) -> Tensor:
    """Return whole numbers from `low` to below `high`, always the same ones."""
    generator = torch.Generator(like.device).manual_seed(_SEED_WHOLE)
    return torch.randint(low, high, like.shape, generator=generator, device=like.device)
