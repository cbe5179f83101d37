"""Choices of tokens alone: no text process loads what makes them."""

from __future__ import annotations

from functools import cached_property

from surestep_gateway.apis.openai.choices import Choices, CompletionOutput, Json
from surestep_gateway.apis.openai.logprobs import TokenSpeller
from surestep_gateway.generation.sequence import Delta, OutputSequence


class TokenChoices(Choices):
    """/inference/v1/generate"""

    name = chunk_name = "generate"

    @property
    def head(self) -> Json:
        return {"request_id": self._generation.origin.request_id}

    @cached_property
    def _speller(self) -> TokenSpeller:
        return TokenSpeller(self._gateway.tokenizer, as_ids=True)

    async def opening(self, sequence: OutputSequence) -> Json | None:
        return None

    def piece(self, sequence: OutputSequence, delta: Delta) -> Json | None:
        if not (delta.token_ids or delta.finish_reason):
            return None
        return {
            "index": sequence.index,
            "logprobs": self.logprobs(sequence, delta.logprobs),
            "finish_reason": delta.finish_reason,
            "token_ids": list(delta.token_ids),
        }

    async def whole(self, sequence: OutputSequence, gathered: CompletionOutput) -> Json:
        wanted = sequence.journal.sampling.want_logprobs
        return {
            "index": sequence.index,
            "logprobs": gathered.logprobs.finish() if wanted else None,
            "finish_reason": gathered.finish_reason,
            "token_ids": gathered.token_ids,
        }
