"""Token counts of a request, updated as its tokens come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class TokenUsage:
    """Counts of all sequences of one request. A prompt counts once, however many choices it has."""

    prompt: int
    cached: int = 0  # of the prompt, served from the prefix cache
    output: int = 0
    reasoning: int | None = None  # of the output; None where reasoning is not set apart

    def shown(self) -> dict[str, Any]:
        """Return the API's `usage` object."""
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.reasoning is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return counts
