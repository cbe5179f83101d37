"""Cases of the ops that read and advance what a request keeps: its KV pages and recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from surestep_kernels.gated_delta.chunks import CHUNK
from surestep_kernels.paged_attention import AttentionBackend, AttentionCase, AttentionRows
from surestep_kernels.paged_attention.backends import choose_attention
from surestep_kernels.recurrent_rows import ConvState, DeltaState, RecurrentRows
from surestep_kernels.store_kv import FP8, LayerCache

from gpu.sizes import (
    BYTES,
    DTYPE,
    Case,
    DeltaSizes,
    Sizes,
    Work,
    activations,
    floats,
    i32,
    kernels,
    size,
)

BLOCK_SIZE = 16
PENDING = 3  # accepted tokens of a window


@cache
def attention(device: str) -> AttentionBackend:
    """Yield cases of Triton, whatever else is installed."""
    return choose_attention("triton", AttentionCase.on(device))


def paged_attention(s: Sizes) -> Iterator[Case]:
    """Windows of 1 and 4 tokens that end at the context's end; then prompts.

    Then windows of 1 token in slots that have room for much more, alike and with one long among
    them.
    """

    def make(
        device: str, rows: int, count: int, context: int, room: int = 0, longest: int = 0
    ) -> Work:
        q = activations(device, rows * count, s.heads, s.head_dim)
        where, num_blocks = _attention_rows(device, rows, count, context, room, longest)
        kv = _cache(device, s, num_blocks, DTYPE)
        run = partial(attention(device).paged_attention, q, kv, where, s.head_dim**-0.5)
        seen = rows * sum(range(context - count + 1, context + 1))  # by all tokens together
        positions = rows * context + max(longest - context, 0)
        seen += positions - rows * context
        pages = 4 * -(-positions // BLOCK_SIZE)
        read = size(q, where[1:]) + pages + positions * 2 * s.kv_heads * s.head_dim * BYTES
        return Work(run, read + q.nbytes, 4 * s.heads * s.head_dim * seen)

    decode = product(s.batches, s.contexts, (1, 4))
    prompts = ((1, length, length) for length in s.prompts)
    for rows, context, count in (*decode, *prompts):
        sized = partial(make, rows=rows, count=count, context=context)
        shape = f"R={rows} tokens={count} context={context}"
        yield Case("paged_attention", f"{shape} {_heads(s)}", sized, cold=True)
    for context, rows in product(s.contexts[:1], s.batches):
        for longest in (0, 8 * max(s.contexts)):
            room = 32 * max(s.contexts)
            sized = partial(make, rows=rows, count=1, context=context, room=room, longest=longest)
            one = f" and one {longest}" if longest else ""
            shape = f"R={rows} tokens=1 context={context}{one} of {room}"
            yield Case("paged_attention", f"{shape} {_heads(s)}", sized, cold=True)


def paged_attention_sinks(s: Sizes) -> Iterator[Case]:
    """Windows of 1 and 4 tokens that end at the context's end, then prompts, of both kinds of layer
    and of cache: what a layer's window hides need not be read."""
    of = s.sinks
    if of is None:
        return

    def make(device: str, rows: int, count: int, context: int, window: int, fp8: bool) -> Work:
        q, sinks = activations(device, rows * count, s.heads, s.head_dim), floats(device, s.heads)
        where, num_blocks = _attention_rows(device, rows, count, context, 0, 0)
        kv = _cache(device, s, num_blocks, FP8 if fp8 else DTYPE)
        run = partial(
            attention(device).paged_attention,
            q,
            kv,
            where,
            s.head_dim**-0.5,
            window=window,
            sinks=sinks,
        )
        by_token = [min(n, window or n) for n in range(context - count + 1, context + 1)]
        positions = rows * min(context, by_token[0] + count - 1)
        read = positions * 2 * s.kv_heads * s.head_dim * kv.k.itemsize
        read += 4 * -(-positions // BLOCK_SIZE) + size(q, sinks, where[1:])
        return Work(run, read + q.nbytes, 4 * s.heads * s.head_dim * rows * sum(by_token))

    decode = product(of.batches, of.contexts, (1, 4))
    prompts = ((1, length, length) for length in of.prompts)
    for (rows, context, count), window, fp8 in product(
        (*decode, *prompts), (0, of.window), (False, True)
    ):
        sized = partial(make, rows=rows, count=count, context=context, window=window, fp8=fp8)
        shape = f"R={rows} tokens={count} context={context} window={window} {_heads(s)}"
        yield Case(f"paged_attention sinks {'fp8' if fp8 else 'bf16'}", shape, sized, cold=True)


def store_kv(s: Sizes) -> Iterator[Case]:
    """Keys and values are parts of one projection; every token goes to a page of its own."""

    def make(device: str, m: int, dtype: torch.dtype) -> Work:
        qkv = activations(device, m, s.heads + 2 * s.kv_heads, s.head_dim)
        _, k, v = qkv.split((s.heads, s.kv_heads, s.kv_heads), dim=1)
        kv = _cache(device, s, m, dtype)
        to = torch.randperm(m, device=device) * BLOCK_SIZE + 5
        run = partial(attention(device).store_kv, k, v, kv, to)
        return Work(run, 2 * k.numel() * (BYTES + dtype.itemsize) + to.nbytes)

    for (name, dtype), m in product({"bf16": DTYPE, "fp8": FP8}.items(), s.rows):
        sized = partial(make, m=m, dtype=dtype)
        yield Case(f"store_kv {name}", f"T={m} {_heads(s)}", sized)


def gated_delta(s: Sizes) -> Iterator[Case]:
    """Decay, as small as it is, keeps the state within bounds from launch to launch."""

    def make(device: str, of: DeltaSizes, step: _Step) -> Work:
        tokens, heads = step.rows * step.tokens, of.v_heads
        qkv, gates = (activations(device, tokens, n) for n in (of.channels, 2 * heads))
        delta = _delta_state(device, of, step.rows)
        a_log, dt_bias = floats(device, 2, heads)
        inputs = qkv, gates, a_log, dt_bias, delta, _recurrent_rows(device, step)
        out = tokens * heads * of.v_dim * BYTES
        flop = 6 * tokens * heads * of.k_dim * of.v_dim
        moved = size(*inputs[:4]) + out + _delta_bytes(of, step)
        return Work(partial(kernels().gated_delta, *inputs), moved, flop)

    for of, step in _recurrent_steps(s):
        heads = f"heads={of.k_heads}+{of.v_heads} {of.k_dim}x{of.v_dim}"
        sized = partial(make, of=of, step=step)
        yield Case("gated_delta", f"{step.shape} {heads}", sized, cold=True)


def causal_conv(s: Sizes) -> Iterator[Case]:
    def make(device: str, of: DeltaSizes, step: _Step) -> Work:
        x = activations(device, step.rows * step.tokens, of.channels)
        keep, weight = of.taps - 1, floats(device, of.taps, of.channels)
        inputs = activations(device, step.rows, keep + of.records, of.channels)
        conv = ConvState(inputs, inputs[:1, :keep].clone())
        rows = _recurrent_rows(device, step)
        read = 0 if step.prompt else keep
        written = keep * (step.prompt or step.pending > 0) + step.tokens * (not step.prompt)
        lines = step.rows * (read + written) * of.channels * BYTES
        run = partial(kernels().causal_conv, x, weight, conv, rows)
        return Work(run, 2 * x.nbytes + weight.nbytes + lines)

    for of, step in _recurrent_steps(s):
        sized = partial(make, of=of, step=step)
        yield Case("causal_conv", f"{step.shape} C={of.channels}", sized, cold=True)


def _heads(s: Sizes) -> str:
    return f"heads={s.heads}+{s.kv_heads} D={s.head_dim}"


def _cache(device: str, s: Sizes, num_blocks: int, dtype: torch.dtype) -> LayerCache:
    shape = attention(device).kv_cache_shape(num_blocks, BLOCK_SIZE, s.kv_heads, s.head_dim)
    return LayerCache(*(activations(device, *shape).to(dtype) for _ in "kv"))


def _attention_rows(
    device: str, rows: int, count: int, context: int, room: int, longest: int
) -> tuple[AttentionRows, int]:
    """Rows whose pages lie anywhere, the last `longest` if that is more; and how many blocks."""
    contexts = [context] * (rows - 1) + [max(context, longest)]
    pages = [-(-length // BLOCK_SIZE) for length in contexts]
    width = max(-(-room // BLOCK_SIZE), *pages)
    tables = torch.zeros(rows, width, dtype=torch.int32, device=device)
    blocks = 1 + torch.randperm(sum(pages), device=device).int()
    for row, own in enumerate(blocks.split(pages)):
        tables[row, : len(own)] = own
    cu_rows = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
    start = i32(device, *[length - count for length in contexts])
    of = AttentionRows(tables, torch.arange(rows, device=device), cu_rows, start, count)
    return of, 1 + sum(pages)


class _Step(NamedTuple):
    """Work of all rows of a recurrent step."""

    rows: int
    tokens: int  # of a row
    pending: int
    prompt: bool  # from its beginning; else a window

    @property
    def shape(self) -> str:
        pending = "" if self.prompt else f" pending={self.pending}"
        return f"R={self.rows} tokens={self.tokens}{pending}"


def _recurrent_steps(s: Sizes) -> Iterator[tuple[DeltaSizes, _Step]]:
    if s.delta is not None:
        for rows, count, pending in product(s.batches, (1, s.delta.records), (0, PENDING)):
            yield s.delta, _Step(rows, count, pending, prompt=False)
        for count in s.prompts:
            yield s.delta, _Step(1, count, 0, prompt=True)


def _recurrent_rows(device: str, step: _Step) -> RecurrentRows:
    def column(value: int) -> torch.Tensor:
        return i32(device, *[value] * step.rows)

    return RecurrentRows(
        slots=torch.randperm(step.rows, device=device),
        cu_rows=torch.arange(step.rows + 1, dtype=torch.int32, device=device) * step.tokens,
        start=column(0 if step.prompt else 100),
        pending=column(step.pending),
        window=column(int(not step.prompt)),
        snapshot_after=column(0),
        snapshot_line=column(0),
        chunked=column(step.tokens // CHUNK * CHUNK if step.prompt else 0),
        max_tokens=step.tokens,
    )


def _delta_state(device: str, of: DeltaSizes, slots: int) -> DeltaState:
    state = floats(device, slots, of.v_heads, of.k_dim, of.v_dim)
    return DeltaState(
        state=state,
        snapshots=state[:1].clone(),
        keys=floats(device, slots, of.records, of.k_heads, of.k_dim),
        deltas=floats(device, slots, of.records, of.v_heads, of.v_dim),
        decays=floats(device, slots, of.records, of.v_heads),
    )


def _delta_bytes(of: DeltaSizes, step: _Step) -> int:
    """Return bytes of state and records: a window advances the state by pending records alone."""
    record = of.k_heads * of.k_dim + of.v_heads * (of.v_dim + 1)
    records = 0 if step.prompt else step.pending + step.tokens
    states = int(not step.prompt) + int(step.prompt or step.pending > 0)
    state = of.v_heads * of.k_dim * of.v_dim
    return 4 * step.rows * (states * state + records * record)


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "paged_attention": paged_attention,
    "paged_attention_sinks": paged_attention_sinks,
    "store_kv": store_kv,
    "gated_delta": gated_delta,
    "causal_conv": causal_conv,
}
