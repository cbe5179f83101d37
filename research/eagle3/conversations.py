"""Conversations that a model has with itself.

A chat model that is given the beginning of a user's turn goes on as a user would (Magpie, Xu et
al., 2024, arXiv 2406.08464), and then answers itself. Half of the first turns begin with a few
words from a list, so that they are about more than what the model likes best.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_OPENINGS = Path(__file__).with_name("openings.txt")
_OPENED = 0.5  # of the first turns begin with one of these
_TWO_TURNS = 0.25  # of the conversations have two questions
_USER_TEMPERATURES = (0.7, 1.0)
_USER_TOKENS = 90
_USER, _ASSISTANT = "\N{WHITE SQUARE}user", "\N{WHITE SQUARE}assistant"  # in no template


class Sampling(NamedTuple):
    """Way to draw a turn."""

    temperature: float  # 0: the likeliest token
    top_p: float


class Turn(NamedTuple):
    """Turn of a conversation: tokens to add, then as many of the model's own at most."""

    ids: Sequence[int]
    max_tokens: int
    stops: frozenset[int]
    sampling: Sampling


class Written(NamedTuple):
    """A conversation: its tokens, and which of them the model gave as answers."""

    ids: list[int]
    answered: list[bool]


class ChatFormat(NamedTuple):
    """The tokens between the turns, as the chat template has them."""

    before_user: list[int]
    before_answer: list[int]
    before_next_user: list[int]
    ends: frozenset[int]  # tokens that end an answer
    openings: list[list[int]]

    @classmethod
    def of(cls, tokenizer: Any, eos_token_ids: Sequence[int]) -> ChatFormat:
        """Read the template of a tokenizer of transformers. Raises ValueError without one."""
        if tokenizer.chat_template is None:
            raise ValueError("the model has no chat template")

        def encode(text: str) -> list[int]:
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

        user, answer = {"role": "user", "content": _USER}, {"role": "assistant"}
        turns = [user, answer | {"content": _ASSISTANT}, user]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        first, _, rest = text.partition(_USER)
        _, _, rest = rest.partition(_ASSISTANT)
        between, _, prompt = rest.partition(_USER)
        return cls(
            encode(first),
            encode(prompt),
            encode(between),
            frozenset(eos_token_ids),
            [encode(words) for words in _OPENINGS.read_text().splitlines()],
        )


def converse(
    chat: ChatFormat, rng: random.Random, default: Sampling, answer_tokens: int
) -> Generator[Turn, list[int], Written]:
    """Yield turns, and be sent what the model says.

    Three of four answers are drawn as the model is served by default, the others greedily or at a
    high temperature.
    """
    said, answered = list[int](), list[bool]()
    between: Sequence[int] = chat.before_user
    for turn in range(1 + (rng.random() < _TWO_TURNS)):
        opening = rng.choice(chat.openings) if turn == 0 and rng.random() < _OPENED else []
        drawn = Sampling(rng.choice(_USER_TEMPERATURES), 0.95)
        stops = chat.ends | {chat.before_answer[0]}
        asked = yield Turn([*between, *opening], _USER_TOKENS, stops, drawn)
        # The token that ended the turn is in front of the answer again; a long question is cut off.
        closing = chat.before_answer[asked[-1] in stops :]
        kind = rng.choices((default, Sampling(0.0, 1.0), Sampling(0.8, 0.95)), (6, 1, 1))[0]
        answer = yield Turn(closing, answer_tokens, chat.ends, kind)
        given = [*between, *opening, *asked, *closing]
        said += [*given, *answer]
        answered += [False] * len(given) + [True] * len(answer)
        if answer[-1] not in chat.ends:
            break
        between = chat.before_next_user[1:]
    return Written(said, answered)
