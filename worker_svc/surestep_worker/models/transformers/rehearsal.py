"""A rehearsal: tokens as transformers attends, alone, cut into pieces, and among others.

Our attention is compared with theirs, and our own results with each other, bit by bit. Ranks
rehearse in step, and all of them have the same logits: either all refuse, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from surestep_common.errors import InvalidRequest
from surestep_kernels import KernelSet
from surestep_kernels.paged_attention import AttentionRows
from torch import Tensor, nn

from surestep_worker.cache.caches import Caches
from surestep_worker.cache.kv_cache import KVCache, KVSpec
from surestep_worker.layers.context import GroupPages, StepBatch

_BLOCK = 16  # tokens
_TOKENS = 67  # at most
_CUTS = (13, 14, 19, 50, 66)  # so that there are prompts, single tokens and windows
_OTHERS = (3, 1)  # tokens of rows before and behind
_FAR = 0.15**2  # squared share of logits that rounding does not come to
_FLIPPED = 0.25  # share of tokens for which routers may choose otherwise, of scores near each other


class Rehearsed(Protocol):
    """Model that is rehearsed: a rank's part of it."""

    def kv_spec(self, block_size: int) -> KVSpec: ...

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor: ...

    def shared_logits(self, hidden: Tensor) -> Tensor: ...

    def as_theirs(self, token_ids: Tensor) -> Tensor: ...


class _Piece(NamedTuple):
    """Tokens of a row."""

    slot: int
    begin: int
    end: int


def rehearse(
    model: Rehearsed, modules: nn.Module, kernels: KernelSet, vocab_size: int, max_len: int
) -> None:
    """See to it that a row's result does not depend on its company, nor on how it is cut.

    Raises InvalidRequest, naming the first of the `modules` whose result does, and where the model
    attends in a way that ours does not.
    """
    length = min(_TOKENS, max_len)
    stage = _Stage(model, modules, kernels, vocab_size, length)
    alone, made = stage.run([_Piece(0, 0, length)])
    wanted = model.as_theirs(stage.tokens[0])
    far = ~((alone - wanted).square().mean(dim=1) <= _FAR * wanted.square().mean())
    if far.float().mean() > _FLIPPED:
        raise InvalidRequest("the model attends in a way that is not served", param="model")
    for begin, end in pairwise((0, *(cut for cut in _CUTS if cut < length), length)):
        among = _Piece(0, begin, end)
        rows = [_Piece(1, 0, _OTHERS[0]), among, _Piece(2, 0, _OTHERS[1])]
        for number, company in enumerate(([among], rows)):
            first = number * _OTHERS[0]
            logits, part = stage.run(company)
            if torch.equal(logits[first : first + end - begin], alone[begin:end]):
                continue
            name = _differing(made, part, slice(begin, end), slice(first, first + end - begin))
            raise InvalidRequest(
                f"rows computed by {name} depend on their company, and so would answers; "
                "--allow-batch-variance serves the model all the same",
                param="model",
            )


class _Stage:
    """A small cache, and three sequences of random tokens."""

    def __init__(
        self,
        model: Rehearsed,
        modules: nn.Module,
        kernels: KernelSet,
        vocab_size: int,
        length: int,
    ) -> None:
        spec = model.kv_spec(_BLOCK)
        self._model, self._modules = model, modules
        self._pages = -(-length // _BLOCK)
        groups = len(spec.layout.windows)
        self._caches = Caches(KVCache(spec, 2 + 3 * groups * self._pages, kernels, "cpu"))
        blocks = torch.arange(2, 2 + 3 * groups * self._pages, dtype=torch.int32)
        self._tables = blocks.view(groups, 3, self._pages)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (3, length), generator=generator)

    def run(self, rows: Sequence[_Piece]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits of rows, and what each module returned."""
        made: dict[str, Tensor] = {}
        names = {module: name for name, module in self._modules.named_modules()}

        def keep(module: nn.Module, args: object, out: object) -> None:
            made.setdefault(names[module], _first(out))

        hooks = [module.register_forward_hook(keep) for module in names]
        try:
            with torch.inference_mode():
                hidden = self._model.forward(self._batch(rows), self._caches)
                logits = self._model.shared_logits(hidden)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, made

    def _batch(self, rows: Sequence[_Piece]) -> StepBatch:
        slot = torch.cat([torch.full((row.end - row.begin,), row.slot) for row in rows])
        positions = torch.cat([torch.arange(row.begin, row.end) for row in rows])
        counts = torch.tensor([0, *(row.end - row.begin for row in rows)])
        groups = []
        for tables in self._tables:
            attention = AttentionRows(
                tables.contiguous(),
                torch.tensor([row.slot for row in rows]),
                counts.cumsum(0).int(),
                torch.tensor([row.begin for row in rows], dtype=torch.int32),
                max_tokens=int(counts.max()),
            )
            page = tables[slot, positions // _BLOCK].long()
            groups.append(GroupPages(attention, page * _BLOCK + positions % _BLOCK))
        return StepBatch(
            token_ids=self.tokens[slot, positions],
            positions=positions,
            groups=tuple(groups),
            hidden_index=torch.arange(len(positions)),
        )


def _first(out: object) -> Tensor:
    while isinstance(out, tuple | list) and out:
        out = out[0]
    return out if isinstance(out, Tensor) else torch.empty(0)


def _differing(whole: dict[str, Tensor], part: dict[str, Tensor], at: slice, here: slice) -> str:
    """Return the module that is the first to give rows something else, of those that end first."""
    for name, made in part.items():
        if made.dim() < 2 or made.shape[0] != 1 or whole[name].dim() != made.dim():
            continue
        if not torch.equal(made[0, here], whole[name][0, at]):
            return name
    return "the output head"
