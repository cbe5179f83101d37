from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels.cases import DTYPES, FORMATS, assert_close, make_quantized
from surestep_kernels import KernelSet, PackedLinear, QuantizedWeight
from surestep_kernels.add_adapters import AdapterWeights
from surestep_kernels.linear import PackedHeads, WeightFormat, with_rounded_rows
from surestep_kernels.linear import triton as linear_ops
from surestep_kernels.moe import ExpertAdapters, PackedExperts, moe_reference
from surestep_kernels.moe import triton as ops
from surestep_kernels.moe.products import choose_size, multiply_heads, pack_heads
from torch import Tensor

WIDTH, INNER, EXPERTS = 72, 36, 5


class Experts:
    """The same experts for the reference, on the CPU, and for the device."""

    def __init__(self, reference: KernelSet, gpu: str, dtype: torch.dtype, first: int = 0) -> None:
        def make(outputs: int, inputs: int) -> list[Tensor]:
            return [torch.randn(outputs, inputs).to(dtype) / inputs**0.5 for _ in range(EXPERTS)]

        gate_up, down = make(2 * INNER, WIDTH), make(WIDTH, INNER)
        pack = reference.pack_linear
        self.expected = reference.pack_experts(
            [pack(w) for w in gate_up], [pack(w) for w in down], first
        )
        self.packed = ops.pack_experts(
            [pack(w.to(gpu)) for w in gate_up], [pack(w.to(gpu)) for w in down], first
        )


def choose(tokens: int, top_k: int, among: int = EXPERTS) -> tuple[Tensor, Tensor]:
    """Weights f32[T, k] and experts i64[T, k] in no order."""
    experts = torch.stack([torch.randperm(among)[:top_k] for _ in range(tokens)])
    return torch.rand(tokens, top_k), experts


def run(gpu: str, packed: PackedExperts, total: Tensor, *inputs: Tensor) -> Tensor:
    out, (x, weights, experts) = total.clone().to(gpu), (tensor.to(gpu) for tensor in inputs)
    ops.moe(out, x, weights, experts, packed)
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (41, 3), (3, EXPERTS)])
def test_equals_the_reference(
    gpu: str, reference: KernelSet, dtype: torch.dtype, tokens: int, top_k: int
) -> None:
    made = Experts(reference, gpu, dtype)
    x, total = torch.randn(tokens, WIDTH).to(dtype), torch.randn(tokens, WIDTH)
    weights, experts = choose(tokens, top_k)
    expected = total.clone()
    reference.moe(expected, x, weights, experts, made.expected)
    out = run(gpu, made.packed, total, x, weights, experts)
    assert_close(out.to(dtype), expected.to(dtype))


def test_experts_of_other_ranks_add_nothing(gpu: str, reference: KernelSet) -> None:
    made = Experts(reference, gpu, torch.float32, first=4)
    x, total = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    weights, experts = choose(6, 3, among=12)
    experts[0] = torch.tensor([0, 11, 3])
    expected = total.clone()
    reference.moe(expected, x, weights, experts, made.expected)
    out = run(gpu, made.packed, total, x, weights, experts)
    assert_close(out, expected)
    assert torch.equal(out[0], total[0])


def test_a_token_is_the_same_alone_and_in_company(gpu: str, reference: KernelSet) -> None:
    """Whichever place it takes among those of its expert."""
    made = Experts(reference, gpu, torch.bfloat16)
    x, total = torch.randn(19, WIDTH).bfloat16(), torch.zeros(19, WIDTH)
    inputs = x, *choose(19, 4)
    together = run(gpu, made.packed, total, *inputs)
    for token in (0, 7, 18):
        alone = run(gpu, made.packed, total[:1], *(part[token : token + 1] for part in inputs))
        assert_close(alone[0], together[token])
        if gpu == "cuda":  # NumPy, which multiplies in the interpreter, rounds rows differently
            assert torch.equal(alone[0], together[token])


def test_every_token_on_one_expert_and_no_tokens(gpu: str, reference: KernelSet) -> None:
    made = Experts(reference, gpu, torch.float32)
    x, total = torch.randn(33, WIDTH), torch.zeros(33, WIDTH)
    weights, experts = torch.ones(33, 1), torch.full((33, 1), 3)
    expected = total.clone()
    reference.moe(expected, x, weights, experts, made.expected)
    assert_close(run(gpu, made.packed, total, x, weights, experts), expected)
    none = run(gpu, made.packed, total[:0], x[:0], weights[:0], experts[:0])
    assert none.shape == (0, WIDTH)


PLACES, MOST = 3, 4


def adapters(inputs: int, outputs: int, parts: int) -> AdapterWeights:
    """Make some of every expert at every place, of all ranks; what no rank counts is NaN."""
    at, n = PLACES * EXPERTS, outputs // parts
    a = torch.randn(at, parts, MOST, inputs) / inputs**0.5
    ranks = torch.randint(0, MOST + 1, (at, parts), dtype=torch.int32)
    a[torch.arange(MOST) >= ranks[:, :, None]] = torch.nan
    spans = torch.tensor([(n * part, n * part + n, part) for part in range(parts)])
    return AdapterWeights(a, torch.randn(at, MOST, outputs), ranks, torch.rand(at, parts), spans)


def merged(weights: list[Tensor], of: AdapterWeights, place: int) -> list[Tensor]:
    """The experts' weights with the shares of the adapter at a place."""
    made = [weight.clone() for weight in weights]
    for expert, (first, end, part) in ((e, s) for e in range(EXPERTS) for s in of.spans.tolist()):
        at = place * EXPERTS + expert
        rank, scale = of.ranks[at, part], of.scales[at, part]
        made[expert][first:end] += scale * of.b[at, :rank, first:end].T @ of.a[at, part, :rank]
    return made


@pytest.mark.parametrize("limit", [None, 1.5])
def test_adapters_of_experts(column: KernelSet, reference: KernelSet, limit: float | None) -> None:
    """A row is what it is with merged weights; one without an adapter has the bits it has alone."""
    gate_up = [torch.randn(2 * INNER, WIDTH) / WIDTH**0.5 for _ in range(EXPERTS)]
    down = [torch.randn(WIDTH, INNER) / INNER**0.5 for _ in range(EXPERTS)]
    shares = adapters(WIDTH, 2 * INNER, 2), adapters(INNER, WIDTH, 1)
    x, (weights, experts) = torch.randn(23, WIDTH), choose(23, 3, among=EXPERTS + 2)
    places = torch.randint(-1, PLACES, (23,), dtype=torch.int32)

    def run(ops: KernelSet, place: int | None = None, of: ExpertAdapters | None = None) -> Tensor:
        its = [gate_up, down]
        if place is not None:
            its = [merged(w, share, place) for w, share in zip(its, shares, strict=True)]
        first, last = ([ops.pack_linear(weight) for weight in weights] for weights in its)
        packed = ops.pack_experts(first, last, 1, limit)
        total = torch.zeros(len(x), WIDTH)
        ops.moe(total, x, weights, experts, packed, adapters=of)
        return total

    out, plain = run(column, of=ExpertAdapters(places, *shares)), run(column)
    assert_close(out[places < 0], plain[places < 0])
    assert column.name != "C" or torch.equal(out[places < 0], plain[places < 0])
    for place in range(PLACES):
        mine = places == place
        assert_close(out[mine], run(reference, place)[mine], ratio=1e-5)
        assert not torch.allclose(out[mine], plain[mine], rtol=1e-3)


def place(weight: QuantizedWeight, gpu: str) -> PackedLinear:
    packed = linear_ops.pack_quantized(weight)
    parts = {name: getattr(packed, name) for name in ("data", "scales", "zeros")}
    return replace(packed, **{name: p.to(gpu) for name, p in parts.items() if p is not None})


def quantised(
    reference: KernelSet, gpu: str, format_: WeightFormat, inner: int, groups: list[int]
) -> tuple[PackedExperts, PackedExperts]:
    """Experts for the reference, and for the device."""
    gate_up = [make_quantized(format_, 2 * inner, WIDTH, group) for group in groups]
    down = [make_quantized(format_, WIDTH, inner, group) for group in groups]
    pack = reference.pack_quantized
    expected = reference.pack_experts([pack(w) for w in gate_up], [pack(w) for w in down], 0)
    packed = ops.pack_experts([place(w, gpu) for w in gate_up], [place(w, gpu) for w in down], 0)
    return expected, packed


@pytest.mark.parametrize(
    ("inner", "groups", "together"),
    [(48, [24, 24, 24], True), (48, [24, 24, 8], False), (36, [24, 24, 24], False)],
)
@pytest.mark.parametrize("format_", FORMATS)
def test_quantised_experts(
    gpu: str,
    reference: KernelSet,
    format_: WeightFormat,
    inner: int,
    groups: list[int],
    together: bool,
) -> None:
    """Run experts one at a time where one has another layout, or gates fill no blocks."""
    expected, packed = quantised(reference, gpu, format_, inner, groups)
    assert (packed.addresses is not None) == together
    x, total = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    weights, experts = choose(4, 2, among=3)
    wanted = total.clone()
    reference.moe(wanted, x, weights, experts, expected)
    assert_close(run(gpu, packed, total, x, weights, experts), wanted)


@pytest.mark.parametrize("case", ["together", "one by one", "down is plain"])
def test_experts_of_fp8_rows(gpu: str, reference: KernelSet, case: str) -> None:
    """Both products take rows that are rounded, of the tokens and of the pairs; if both are FP8."""
    groups = [24, 24, 8 if case == "one by one" else 24]
    expected, packed = quantised(reference, gpu, WeightFormat.FP8, 48, groups)
    if case == "down is plain":
        plain = [reference.pack_linear(torch.randn(WIDTH, 48)) for _ in groups]
        expected = reference.pack_experts(expected.gate_up, plain, 0)
        placed = [replace(linear, data=linear.data.to(gpu)) for linear in plain]
        packed = ops.pack_experts(packed.gate_up, placed, 0)
    assert (packed.addresses is None) == (case == "one by one")
    x, total = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    weights, experts = choose(4, 2, among=3)
    wanted, out = total.clone(), total.clone().to(gpu)
    rounded = with_rounded_rows(reference.linear)
    moe_reference(wanted, x, weights, experts, expected, linear=rounded)
    ops.moe(out, x.to(gpu), weights.to(gpu), experts.to(gpu), packed, fp8_rows=True)
    # On a GPU the gates are summed otherwise, so that some are rounded to the next FP8 number.
    assert_close(out.cpu(), wanted, ratio=2e-3 if gpu == "cuda" else None)


def whole(packed: PackedExperts) -> None:
    """Sums without rounding: NumPy, which multiplies in the interpreter, has orders of its own."""
    for linear in packed.gate_up:
        linear.data.copy_(torch.randint(-2, 3, linear.data.shape))
    for linear in packed.down:
        linear.data.copy_(torch.arange(WIDTH)[:, None] % INNER == torch.arange(INNER))


@pytest.mark.parametrize("widths", [linear_ops.ONE_WIDTH, linear_ops.ALL_WIDTHS])
def test_a_token_is_the_same_whatever_the_load(
    gpu: str, reference: KernelSet, widths: tuple[int, ...]
) -> None:
    """Tiles of all sizes, by the mean number of pairs of an expert."""
    made = Experts(reference, gpu, torch.bfloat16)
    whole(made.packed)
    sizes = set()
    x, (weights, experts) = torch.randint(-1, 2, (3, WIDTH)).bfloat16(), choose(3, 3)
    alone = run(gpu, made.packed, torch.zeros(3, WIDTH), x, weights, experts)
    for copies in (1, 12, 36):
        many_x, many_weights, many_experts = (
            part.repeat(copies, 1).to(gpu) for part in (x, weights, experts)
        )
        out = torch.zeros(3 * copies, WIDTH, device=gpu)
        ops.moe(out, many_x, many_weights, many_experts, made.packed, widths)
        assert torch.equal(out.cpu(), alone.repeat(copies, 1))
        sizes.add(choose_size(9 * copies, EXPERTS, torch.bfloat16, widths))
    assert {size.columns for size in sizes} == {64, 128}
    assert len({size.pairs for size in sizes}) == len(widths)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("format_", [WeightFormat.BF16, WeightFormat.FP8, WeightFormat.INT4])
def test_heads_are_multiplied_each_by_its_weight(
    gpu: str, reference: KernelSet, format_: WeightFormat, tokens: int
) -> None:
    """The parts of a token are of one tensor, in which other things lie between tokens."""
    x = torch.randn(tokens, 3 * WIDTH + 5)[:, : 3 * WIDTH].unflatten(1, (3, WIDTH))
    if format_ is WeightFormat.BF16:
        x, plain = x.bfloat16(), torch.randn(3, INNER, WIDTH).bfloat16()
        weights = [reference.pack_linear(weight) for weight in plain]
        heads = pack_heads([reference.pack_linear(weight.to(gpu)) for weight in plain])
    else:
        made = [make_quantized(format_, INNER, WIDTH, 24) for _ in range(3)]
        weights = [reference.pack_quantized(weight) for weight in made]
        heads = pack_heads([place(weight, gpu) for weight in made])
    assert heads.addresses is not None
    expected = reference.multiply_heads(x, PackedHeads(weights))
    assert_close(multiply_heads(x.to(gpu), heads).cpu(), expected)
    if format_ is WeightFormat.FP8:
        rounded = replace(reference, linear=with_rounded_rows(reference.linear))
        expected = rounded.multiply_heads(x, PackedHeads(weights))
        assert_close(multiply_heads(x.to(gpu), heads, fp8_rows=True).cpu(), expected)
