"""Stop ids: masked until min_tokens are emitted, and the end of a window once chosen."""

from __future__ import annotations

import torch
from surestep_proto import engine_pb2 as pb

from .features import Rows


class StopTokens:
    """stop_token_ids and min_tokens."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.active = torch.zeros(num_slots, dtype=torch.bool)
        self._min_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._count = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._ids = torch.zeros(num_slots, 0, dtype=torch.int64, device=device)  # [S, longest]
        self._widths = torch.zeros(num_slots, dtype=torch.int64)  # the counts, on the host

    def admit(self, slot: int, params: pb.SamplingParams) -> None:
        count = len(params.stop_token_ids)
        missing = count - self._ids.shape[1]
        if missing > 0:
            self._ids = torch.nn.functional.pad(self._ids, (0, missing))
        self._ids[slot, :count] = self._ids.new_tensor(params.stop_token_ids[:])
        self._count[slot] = self._widths[slot] = count
        self._min_tokens[slot] = params.min_tokens
        self.active[slot] = count > 0 and params.min_tokens > 0

    def free(self, slot: int) -> None:
        self._count[slot] = self._widths[slot] = 0
        self.active[slot] = False

    def apply(self, z: torch.Tensor, rows: Rows) -> None:
        early = rows.length - rows.prompt_len < self._min_tokens[rows.slot]
        row, column = (self._valid(rows.slot) & early.unsqueeze(1)).nonzero(as_tuple=True)
        z[row, self._ids[rows.slot[row], column]] = float("-inf")

    def contains(self, slot: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Whether token_ids i64[R,K] end the request in slot i64[R] -> bool[R,K]."""
        valid = self._valid(slot)
        equal = token_ids.unsqueeze(2) == self._ids[slot, : valid.shape[1]].unsqueeze(1)
        return (equal & valid.unsqueeze(1)).any(dim=2)

    def _valid(self, slot: torch.Tensor) -> torch.Tensor:
        """Columns of the ids that are those of each slot; no more than the longest of them has."""
        width = int(self._widths[slot].max()) if len(slot) else 0
        columns = torch.arange(width, device=self._ids.device)
        return columns < self._count[slot].unsqueeze(1)
