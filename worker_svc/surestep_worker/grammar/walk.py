"""A request's way through its grammar, token by token.

What may come next is a function of the tokens that were emitted and of nothing else, so a walk can
be repeated anywhere: in another slot, after a crash, for another sample of the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher
from surestep_common.errors import InvalidRequest

from .matcher import one_line

Words = npt.NDArray[np.int32]


class Walk:
    """A matcher of llguidance, and the end of reasoning that it waits for.

    It must only be advanced by tokens that its mask allows: a matcher that has refused one is of no
    use any more. Hence it is copied before it follows drafts.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        begins_after: Sequence[int],
        stop_ids: Sequence[int],
        min_tokens: int = 0,
    ) -> None:
        self._matcher = matcher
        self._begins_after = list(begins_after)
        self._stops = frozenset(stop_ids)
        ids = np.array(sorted(self._stops), dtype=np.int64)
        self._stop_words = ids // 32
        self._stop_bits = (1 << ids % 32).astype(np.uint32).view(np.int32)
        self._latest = list[int]()  # tokens, as many as the end of reasoning has, before it comes
        self._early = min_tokens  # tokens that are still to come before any stop id
        self.begun = not begins_after

    def copy(self) -> Self:
        """Return a walk that goes on from here by itself. Takes about 10 microseconds."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied._matcher, copied._latest = self._matcher.deep_copy(), self._latest.copy()
        return copied

    def advance(self, token: int) -> None:
        """Go on by a token. Raises InvalidRequest if it does not belong to the grammar."""
        self._early = max(0, self._early - 1)
        if not self.begun:
            self._wait_for_begin(token)
        elif token not in self._stops and not self._matcher.consume_token(token):
            raise InvalidRequest(
                f"grammar: token {token}, which was emitted, does not belong to it: "
                f"{one_line(self._matcher.get_error())}",
                param="grammar",
            )

    def fill(self, words: Words) -> None:
        """Set the bits of the tokens that may come next, in words i32[ceil(vocabulary / 32)].

        Stop ids of the request may come where the output belongs to the grammar, also if they are
        no end-of-sequence tokens of the model. Elsewhere, and before `min_tokens`, they may come
        only if nothing else may. Raises InvalidRequest when a limit is exceeded.
        """
        if self.begun:
            self._fill_by_grammar(words)
        else:
            words[:] = -1
        if self._early or (self.begun and not self._matcher.is_accepting()):
            others = words.copy()
            np.bitwise_and.at(others, self._stop_words, ~self._stop_bits)
            if others.any():
                words[:] = others

    def _fill_by_grammar(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            message = one_line(self._matcher.get_error())
            raise InvalidRequest(f"grammar: nothing goes on from here: {message}", param="grammar")
        if self._matcher.is_accepting():
            np.bitwise_or.at(words, self._stop_words, self._stop_bits)

    @property
    def has_mask(self) -> bool:
        """Return whether some token may not come next."""
        return self.begun or (self._early > 0 and bool(self._stops))

    def forced(self) -> list[int]:
        """Return tokens that spell what must come next in any case; the first few, or none.

        They are drafts like any other: the masks of their positions decide.
        """
        forced: list[int] = self._matcher.compute_ff_tokens() if self.begun else []
        return forced

    def stops(self, token: int) -> bool:
        """Return whether the request ends with this token."""
        return token in self._stops

    def _wait_for_begin(self, token: int) -> None:
        self._latest = [*self._latest, token][-len(self._begins_after) :]
        self.begun = self._latest == self._begins_after


def allows(words: Words, token: int) -> bool:
    """Return whether a mask has the bit of a token."""
    return bool(words[token >> 5] >> (token & 31) & 1)
