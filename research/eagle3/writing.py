"""The model writes, and what a head is going to read of it is captured at the same time.

A batch of conversations runs through the model of our worker, without a scheduler: every step
takes one token of each, or all that was put in front of it. Hidden states are kept where those for
a draft head are kept, beside keys and values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from surestep_common.invariants import NULL_BLOCK
from surestep_kernels.paged_attention import AttentionRows
from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache, KVHeads, LatentWidths
from surestep_worker.cache.recurrent import RecurrentSpec
from surestep_worker.config import WorkerSettings
from surestep_worker.distributed.tensor_parallel import TensorParallel
from surestep_worker.layers.context import GroupPages, StepBatch
from surestep_worker.layers.draft_head import BlockPass
from surestep_worker.models import Model, ModelSource, load_model
from surestep_worker.startup.choose_kernels import choose_kernels
from torch import Tensor

from .conversations import ChatFormat, Sampling, Turn, Written, converse

_BLOCK = 16  # tokens
_LIKELIEST = 256  # tokens that are drawn from


class Observed(NamedTuple):
    """A conversation of T tokens, and the model's states at each of them.

    It has not read the last one: what stands there is of another conversation.
    """

    written: Written
    captured: Tensor  # [T, n * H] residual stream after each captured layer
    hidden: Tensor  # [T, H] normed, from which the logits come


class Recorder:
    """A draft head that drafts nothing: it only keeps what a head could read."""

    reads_hidden, capturable = True, True
    other_layers: tuple[int, ...] | None = None
    kv_layers: tuple[KVHeads | LatentWidths, ...] = ()
    recurrent: RecurrentSpec | None = None
    token_ids: Tensor | None = None
    block: BlockPass | None = None

    def __init__(self, layers: Sequence[int], model_width: int) -> None:
        self.captured_layers = tuple(layers)
        self.width = (len(layers) + 1) * model_width

    def keep(self, hidden: Tensor, captured: Sequence[Tensor]) -> Tensor:
        return torch.cat((*captured, hidden), dim=1)

    def forward(self, hidden: Tensor, batch: StepBatch, caches: Caches) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class _Slot:
    """A conversation under way."""

    def __init__(self, story: Generator[Turn, list[int], Written]) -> None:
        self._story = story
        self.turn = next(story)
        self.consumed = 0  # tokens that the model has read
        self.pending = list(self.turn.ids)
        self._said = list[int]()
        self.written: Written | None = None  # until it has ended

    def add(self, token: int) -> None:
        """Take the token that follows all pending ones, which the model has read now."""
        self.consumed += len(self.pending)
        self.pending = [token]
        self._said.append(token)
        if token not in self.turn.stops and len(self._said) < self.turn.max_tokens:
            return
        try:
            self.turn = self._story.send(self._said)
        except StopIteration as end:
            self.written = end.value
        else:
            self.pending += self.turn.ids
            self._said = []


class Writer:
    """A model with room for a number of conversations at once."""

    def __init__(self, folder: Path, layers: Sequence[int], *, slots: int, device: str) -> None:
        settings = WorkerSettings.model_validate({"model": folder, "device": device})
        source = ModelSource(folder)
        self._kernels = choose_kernels(settings, source)
        self.model: Model = load_model(
            source, dtype="auto", device=device, tp=TensorParallel(), kernels=self._kernels
        )
        self.model.draft_head = Recorder(layers, self.model.config.hidden_size)
        self._slots, self._device = slots, device

    def write(
        self, chat: ChatFormat, default: Sampling, answer_tokens: int, seed: int
    ) -> Iterator[Observed]:
        """Yield conversations without end."""
        rng = random.Random(seed)
        torch.manual_seed(seed)

        def new() -> _Slot:
            return _Slot(converse(chat, random.Random(rng.getrandbits(64)), default, answer_tokens))

        blocks = -(-self._longest(chat, answer_tokens) // _BLOCK)
        spec = self.model.kv_spec(_BLOCK)
        shape = len(spec.layout.windows), self._slots, blocks
        tables = torch.arange(math.prod(shape), dtype=torch.int32) + NULL_BLOCK + 1
        tables = tables.view(shape).to(self._device)
        total = NULL_BLOCK + 1 + tables.numel()
        caches = Caches(KVCache(spec, total, self._kernels, self._device))
        slots = [new() for _ in range(self._slots)]
        while True:
            chosen = self._step(slots, tables, caches)
            for i, token in enumerate(chosen):
                slots[i].add(token)
                written = slots[i].written
                if written is not None:
                    yield self._observed(written, tables[0, i], caches)
                    slots[i] = new()

    def _longest(self, chat: ChatFormat, answer_tokens: int) -> int:
        turn = len(chat.before_user) + len(chat.before_next_user) + len(chat.before_answer)
        return min(2 * (turn + 128 + answer_tokens), self.model.config.max_position)

    @torch.inference_mode()
    def _step(self, slots: Sequence[_Slot], tables: Tensor, caches: Caches) -> list[int]:
        """Feed what is pending; return the token that each draws next."""
        counts = torch.tensor([len(slot.pending) for slot in slots])
        start = torch.tensor([slot.consumed for slot in slots])
        ends = counts.cumsum(0)
        cu = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
        row = torch.repeat_interleave(torch.arange(len(slots)), counts)
        position = torch.arange(int(cu[-1])) - cu[row] + start[row]
        device = self._device
        which = torch.arange(len(slots), device=device)
        runs = cu.int().to(device), start.int().to(device), int(counts.max())
        block = tables.cpu()[:, row, position // _BLOCK].long()
        places = (block * _BLOCK + position % _BLOCK).to(device)
        groups = tuple(
            GroupPages(AttentionRows(table, which, *runs), place)
            for table, place in zip(tables, places, strict=True)
        )
        tokens = torch.tensor([token for slot in slots for token in slot.pending])
        last = (ends - 1).to(device)
        batch = StepBatch(
            tokens.to(device),
            position.to(device),
            groups,
            last,
        )
        logits = self.model.logits(self.model.forward(batch, caches)[last])
        return _draw(logits, [slot.turn.sampling for slot in slots]).tolist()

    def _observed(self, written: Written, table: Tensor, caches: Caches) -> Observed:
        blocks = caches.kv.hidden.unflatten(0, (-1, _BLOCK))[table.long()]
        kept = blocks.flatten(0, 1)[: len(written.ids)].cpu()
        width = self.model.config.hidden_size
        return Observed(written, kept[:, :-width].clone(), kept[:, -width:].clone())


def _draw(logits: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Tokens [N] from logits f32[N, V], within `top_p` of the likeliest ones."""
    best, ids = logits.topk(min(_LIKELIEST, logits.shape[1]))
    temperature = torch.tensor([[each.temperature] for each in sampling], device=logits.device)
    top_p = torch.tensor([[each.top_p] for each in sampling], device=logits.device)
    chances = (best / temperature.clamp(min=1e-3)).softmax(1)
    outside = chances.cumsum(1) - chances >= top_p
    outside |= (temperature == 0) & (torch.arange(best.shape[1], device=logits.device) > 0)
    picked = torch.multinomial(chances.masked_fill(outside, 0.0), 1)
    return ids.gather(1, picked)[:, 0]
