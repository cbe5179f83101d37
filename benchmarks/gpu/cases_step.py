"""Cases of the ops that draft, choose tokens and keep a step on its device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from surestep_kernels.choose import Chosen, DrawParams, RowStatus
from surestep_kernels.commit_step import StopIds, report_width
from surestep_kernels.gather_tokens import TokenRuns
from surestep_kernels.shape_logits import Masks, Penalties, Positions, Shaping
from surestep_kernels.slot_state import DraftIds, SlotState, StepRows
from surestep_kernels.triton import STEP_OPS
from surestep_kernels.write_runs import Runs
from torch import Tensor

from gpu.sizes import Case, Sizes, Work, i32, kernels, size

BLOCK_SIZE, DRAFTS, RUN = 16, 4, 8
DRAWS = {  # name: temperature, top_k, top_p, what the best tokens are ahead by
    "greedy": (0.0, 0, math.inf, 12.0),
    "random": (1.0, 0, math.inf, 12.0),
    "top_k=50 top_p=0.95": (1.0, 50, 0.95, 12.0),
    "top_p=0.95 peaked": (1.0, 0, 0.95, 12.0),
    "top_p=0.95 flat": (1.0, 0, 0.95, 0.0),  # more tokens than the list of a row holds
}
PEAKS = 40  # tokens that are ahead


def ngram(s: Sizes) -> Iterator[Case]:
    """Rows without a match read all of their tokens, as every other row does."""

    def make(device: str, rows: int, width: int) -> Work:
        tokens = torch.randint(s.vocab, (rows, width), dtype=torch.int32, device=device)
        columns = torch.arange(rows), torch.full((rows,), width), torch.full((rows,), 4)
        inputs = tokens, *(column.to(device) for column in columns)
        run = partial(kernels().ngram, *inputs, num_drafts=4, max_n=5, min_n=2)
        return Work(run, tokens.nbytes)

    for rows, width in s.lookups:
        shape = f"R={rows} length={width}"
        yield Case("ngram", shape, partial(make, rows=rows, width=width), cold=True)


def choose(s: Sizes) -> Iterator[Case]:
    """Yield choices: every logit is read once; a draw reads most or all of them twice."""

    def make(device: str, n: int, draw: str) -> Work:
        z = torch.randn(n, s.vocab, device=device) * 3
        z[:, :: -(-s.vocab // PEAKS)] += DRAWS[draw][-1]
        length = randint(device, 1 << 20, n)
        params, random, truncated = _draw_params(device, n, s.vocab, draw)
        run = partial(
            STEP_OPS.choose,
            z,
            column(device, n),
            length,
            params,
            random=random,
            truncated=truncated,
        )
        return Work(run, size(z, length) + size(params) + 3 * length.nbytes)

    for draw, n in product(DRAWS, s.sampled):
        yield Case(f"choose {draw}", f"N={n} V={s.vocab}", partial(make, n=n, draw=draw))


def masks(s: Sizes) -> Iterator[Case]:
    """Grammars at every position that allow a hundredth of the tokens."""

    def make(device: str, n: int) -> Work:
        z, which = torch.randn(n, s.vocab, device=device), column(device, n)
        allowed = torch.rand(n, -(-s.vocab // 32) * 32, device=device) < 0.01
        weights = 1 << torch.arange(32, device=device)
        words = (allowed.view(n, -1, 32) * weights).sum(dim=2).int()
        positions = Positions(which, which, which, which.view(1, n))
        run = partial(STEP_OPS.shape_logits, z, positions, Shaping(masks=Masks(which, words)))
        return Work(run, 2 * size(z) + size(words))

    for n in s.sampled:
        yield Case("shape_logits masks", f"N={n} V={s.vocab}", partial(make, n=n))


def shape_logits(s: Sizes) -> Iterator[Case]:
    """Penalties of every position; written are the logits of the tokens of its history."""

    def make(device: str, n: int, context: int) -> Work:
        z, tokens = torch.randn(n, s.vocab, device=device), randint(device, s.vocab, n, context)
        which, length = column(device, n), i32(device, *[context] * n)
        ones = torch.ones(n, device=device)
        penalties = Penalties(which, length // 2, 1.1 * ones, 0.5 * ones, 0.1 * ones)
        positions = Positions(which, which, length, tokens)
        run = partial(STEP_OPS.shape_logits, z, positions, Shaping(penalties=penalties))
        changed = sum(len(line.unique()) for line in tokens) * z.itemsize
        return Work(run, size(z, positions, penalties) + changed)

    for n, context in product(s.sampled, s.contexts):
        shape = f"N={n} V={s.vocab} length={context}"
        yield Case("shape_logits penalties", shape, partial(make, n=n, context=context))


def write_runs(s: Sizes) -> Iterator[Case]:
    """Short runs, such as every decode step has."""

    def make(device: str, count: int) -> Work:
        to = torch.randperm(count, device=device).int() * 2 * RUN
        words = randint(device, 1 << 20, count * RUN)
        runs = Runs(to, column(device, count + 1) * RUN, words, RUN)
        memory = randint(device, 1 << 20, 2 * count * RUN)
        return Work(partial(STEP_OPS.write_runs, memory, runs), size(runs) + words.nbytes)

    for count in s.batches:
        yield Case("write_runs", f"G={count} words={RUN}", partial(make, count=count))


def gather_step(s: Sizes) -> Iterator[Case]:
    def make(device: str, rows: int) -> Work:
        state, (step, drafts) = _slots(device, s, rows), _step(device, s, rows)
        error, num_blocks = i32(device, 0), state.block_tables.numel() + 1
        inputs = step, drafts, state, error, BLOCK_SIZE, num_blocks
        known = ("slot", "cu_rows", "advances", "snapshot_len", "token_row", "position_row")
        read = size(*(getattr(step, name) for name in known), step.position_offset, drafts)
        tokens = len(step.token_row)
        read += 4 * rows * 3 + tokens * (4 + 4)  # lengths of slots; token ids and pages
        written = rows * (4 * 4 + 8) + tokens * (3 * 8 + 4) + drafts.ids.nbytes
        return Work(partial(STEP_OPS.gather_step, *inputs), read + written)

    for rows in s.batches:
        yield Case("gather_step", _step_shape(s, rows), partial(make, rows=rows))


def gather_tokens(s: Sizes) -> Iterator[Case]:
    """Yield the inputs of an MTP head: positions, each with the token behind it."""

    def make(device: str, rows: int) -> Work:
        state, (step, _) = _slots(device, s, rows), _step(device, s, rows)
        valid = torch.full_like(step.slot, 1 + DRAFTS)
        runs = TokenRuns(step.token_row, step.cu_rows, step.slot.long(), valid * 0, valid)
        run = partial(
            STEP_OPS.gather_tokens,
            runs,
            state,
            i32(device, 0),
            shift=1,
            block_size=BLOCK_SIZE,
            num_blocks=state.block_tables.numel() + 1,
        )
        return Work(run, size(runs) + len(step.token_row) * (2 * 4 + 3 * 8))

    for rows in s.batches:
        yield Case("gather_tokens", _step_shape(s, rows), partial(make, rows=rows))


def commit_step(s: Sizes) -> Iterator[Case]:
    """All drafts are accepted. Slots advance from launch to launch, and have room for it."""

    def make(device: str, rows: int) -> Work:
        state, (step, drafts) = _slots(device, s, rows), _step(device, s, rows)
        chosen_ids = torch.cat((drafts.ids, drafts.ids[:, :1]), dim=1).flatten()
        chosen = Chosen(chosen_ids, torch.full_like(chosen_ids, int(RowStatus.OK)))
        stops = StopIds(column(device, rows + 1), i32(device, *[s.vocab] * rows))
        run = partial(STEP_OPS.commit_step, step, drafts, chosen, stops, state)
        columns = step.slot, step.cu_rows, step.advances, step.catch_up, step.window
        read = size(columns, step.cu_windows, drafts, chosen, stops) + 4 * rows * 3
        written = 4 * rows * (report_width(DRAFTS) + DRAFTS + 1 + 4)  # report, tokens, lengths
        return Work(run, read + written)

    for rows in s.batches:
        yield Case("commit_step", f"R={rows} drafts={DRAFTS}", partial(make, rows=rows))


def fingerprint(s: Sizes) -> Iterator[Case]:
    """Hidden states of every window's positions."""

    def make(device: str, rows: int) -> Work:
        step, _ = _step(device, s, rows)
        hidden = torch.randn(len(step.position_row), s.hidden, dtype=torch.bfloat16, device=device)
        valid = torch.full_like(step.slot, 1 + DRAFTS)
        run = partial(STEP_OPS.fingerprint, hidden, step, valid)
        return Work(run, size(hidden, step.position_row, step.position_offset))

    for rows in s.batches:
        yield Case("fingerprint", f"N={rows * (1 + DRAFTS)} H={s.hidden}", partial(make, rows=rows))


def randint(device: str, high: int, *shape: int) -> Tensor:
    """i32 from 0 to high - 1."""
    return torch.randint(high, shape, dtype=torch.int32, device=device)


def column(device: str, count: int) -> Tensor:
    """i32 0, 1, .."""
    return torch.arange(count, dtype=torch.int32, device=device)


def _draw_params(device: str, n: int, vocab: int, draw: str) -> tuple[DrawParams, bool, bool]:
    """The same for every window; whether they draw, and from a part of the vocabulary."""
    temperature, top_k, top_p, _ = DRAWS[draw]
    ones = torch.ones(n, device=device)
    params = DrawParams(
        temperature=temperature * ones,
        seed_low=column(device, n),
        seed_high=column(device, n),
        max_gap=math.inf * ones,
        top_k=i32(device, *[top_k or vocab] * n),
        top_p=top_p * ones,
    )
    return params, temperature > 0, top_k > 0 or top_p < math.inf


def _slots(device: str, s: Sizes, rows: int) -> SlotState:
    """Half of each slot, or more, is free."""
    width, lines = 2 * max(s.contexts), rows + 1
    pages = -(-width // BLOCK_SIZE)
    committed = i32(device, *[min(s.contexts)] * rows, 0)
    return SlotState(
        tokens=randint(device, s.vocab, lines, width),
        block_tables=1 + column(device, lines * pages).view(1, lines, pages),
        committed=committed,
        known=committed + 1,
        folded=committed.clone(),
        drafter_len=committed.clone(),
    )


def _step(device: str, s: Sizes, rows: int) -> tuple[StepRows, DraftIds]:
    """A window of the newest token and its drafts for each of the rows."""
    row, nothing, one = column(device, rows), i32(device, *[0] * rows), 1 + DRAFTS
    bounds, token_row = column(device, rows + 1) * one, row.repeat_interleave(one)
    return StepRows(
        slot=torch.randperm(rows, device=device).int(),
        cu_rows=bounds,
        advances=nothing,
        snapshot_len=nothing,
        snapshot_line=nothing,
        chunked=nothing,
        catch_up=nothing,
        window=row,
        token_row=token_row,
        position_row=token_row,
        position_offset=column(device, one).repeat(rows),
        cu_windows=bounds,
    ), DraftIds(randint(device, s.vocab, rows, DRAFTS), nothing + DRAFTS)


def _step_shape(s: Sizes, rows: int) -> str:
    return f"R={rows} drafts={DRAFTS} pages={-(-2 * max(s.contexts) // BLOCK_SIZE)}"


OPS: dict[str, Callable[[Sizes], Iterator[Case]]] = {
    "ngram": ngram,
    "choose": choose,
    "masks": masks,
    "shape_logits": shape_logits,
    "write_runs": write_runs,
    "gather_step": gather_step,
    "gather_tokens": gather_tokens,
    "commit_step": commit_step,
    "fingerprint": fingerprint,
}
