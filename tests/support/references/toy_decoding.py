"""A model that is a function of the history, and the loop that decodes it. No forward pass.

The loop does with the ops of a step what a step of the worker does: draft, write the drafts into
the token table, sample every row, verify, commit. Stale table entries are poisoned at each step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from support.kernels.step_sampling import sample, verify
from surestep_proto import sampling_pb2 as pb
from surestep_proto import worker_pb2
from surestep_worker.drafters import Drafter
from surestep_worker.step.sampling import SamplingTable

VOCAB = 24


class Request(NamedTuple):
    """What to decode."""

    prompt: list[int]
    params: pb.SamplingParams
    max_tokens: int
    num_emitted: int = 0  # leading part of max_tokens that stands at the end of the prompt already


class Decoded(NamedTuple):
    """What came of a run."""

    output: list[list[int]]  # ids per request
    n_drafts: int
    n_accepted: int
    num_steps: int


class ToyModel:
    """Logits from the last two tokens and a checksum of all: every token of the history matters."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._tables = torch.randn(3, VOCAB, VOCAB, generator=generator) * 1.5

    def logits(
        self, tokens: torch.Tensor, slot: torch.Tensor, length: torch.Tensor
    ) -> torch.Tensor:
        """f32[N,V] of the token at index length[n], after tokens[slot[n], :length[n]]."""
        history = tokens[slot].long()
        known = torch.arange(tokens.shape[1]) < length.unsqueeze(1)
        checksum = (history * known * torch.arange(1, tokens.shape[1] + 1)).sum(1) % VOCAB
        row = torch.arange(len(slot))
        last, before = history[row, length - 1], history[row, length - 2]
        return self._tables[0][last] + self._tables[1][before] + self._tables[2][checksum]


class Decoding:
    """Permanent slots, one per request, filled at the start and freed when done."""

    def __init__(self, model: ToyModel, requests: list[Request]) -> None:
        n = len(requests)
        width = max(len(r.prompt) + r.max_tokens for r in requests) + 20
        self._model = model
        self._requests = requests
        self._slots = SamplingTable(n, VOCAB)
        self._tokens = torch.zeros(n, width, dtype=torch.int32)
        self._length = torch.tensor([len(r.prompt) for r in requests])
        self._max_len = torch.tensor(
            [len(r.prompt) - r.num_emitted + r.max_tokens for r in requests]
        )
        self._start = self._length.clone()
        self._open = torch.ones(n, dtype=torch.bool)
        self._poison = torch.Generator().manual_seed(0)
        self._counts = torch.zeros(3, dtype=torch.int64)
        for slot, request in enumerate(requests):
            self._slots.admit(slot, request.params, len(request.prompt) - request.num_emitted)
            self._tokens[slot, : len(request.prompt)] = torch.tensor(request.prompt).int()

    def run(self, drafter: Drafter | None, k: int) -> Decoded:
        """Decode to the end with at most k drafts per window."""
        while self._open.any():
            # Row order is another one in every step, as nothing may depend on it.
            order = torch.randperm(len(self._open), generator=self._poison)
            self._step(order[self._open[order]], drafter, k)
        output = [
            self._tokens[s, self._start[s] : self._length[s]].tolist()
            for s in range(len(self._open))
        ]
        return Decoded(output, *(int(count) for count in self._counts))

    def _step(self, slot: torch.Tensor, drafter: Drafter | None, k: int) -> None:
        self._poison_stale_entries()
        length = self._length[slot]
        drafts, counts = torch.zeros(len(slot), 0).long(), torch.zeros_like(slot)
        if drafter is not None:
            caps = (self._max_len[slot] - length - 1).clamp(max=k)
            drafts, counts, *_ = drafter.propose(self._tokens, slot, length, caps)
            assert (counts <= caps).all()
        for column in range(drafts.shape[1]):
            drafted = counts > column
            place = slot[drafted], length[drafted] + column
            self._tokens[place] = drafts[drafted, column].int()

        rows = torch.arange(len(slot)).repeat_interleave(counts + 1)
        cu_rows = torch.cat([torch.zeros(1).long(), (counts + 1).cumsum(0)])
        row_length = length[rows] + torch.arange(len(rows)) - cu_rows[rows]
        logits = self._model.logits(self._tokens, slot[rows], row_length)
        sampled = sample(logits, slot[rows], row_length, self._tokens, self._slots)
        verdict = verify(sampled, cu_rows, drafts, counts, slot, self._slots)
        assert (verdict.status == worker_pb2.OK).all()
        self._counts += torch.stack([counts.sum(), verdict.n_accepted.sum(), torch.tensor(1)])
        for r, s in enumerate(slot.tolist()):
            self._commit(s, verdict.tokens[r, : verdict.n_emitted[r]])

    def _commit(self, slot: int, emitted: torch.Tensor) -> None:
        start = int(self._length[slot])
        self._tokens[slot, start : start + len(emitted)] = emitted.int()
        self._length[slot] += len(emitted)
        stopped = int(emitted[-1]) in self._requests[slot].params.stop_token_ids
        if stopped or self._length[slot] == self._max_len[slot]:
            self._open[slot] = False
            self._slots.free(slot)

    def _poison_stale_entries(self) -> None:
        stale = torch.arange(self._tokens.shape[1]) >= self._length.unsqueeze(1)
        noise = torch.randint(0, VOCAB, self._tokens.shape, generator=self._poison).int()
        self._tokens[stale] = noise[stale]
