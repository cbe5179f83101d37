"""Texts for the tiny hybrid: the language reference that Python carries, and dialogues."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import TokenizersBackend

from .dialogues import Dialogue, draw

VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special: a server that skips special tokens must still see them.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# Words with the space before them, digits one by one, runs of punctuation, and white space.
_WORDS = Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]|\s+(?!\S)|\s+")
_HELD_OUT = 10  # every tenth paragraph
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def text() -> tuple[str, str]:
    """Training and held-out text: the topics of `help()`, (c) Python Software Foundation."""
    paragraphs = "\n\n\n".join(topics[name] for name in sorted(topics)).split("\n\n\n")
    train = [p for i, p in enumerate(paragraphs) if i % _HELD_OUT]
    return "\n\n\n".join(train), "\n\n\n".join(paragraphs[::_HELD_OUT])


def make_tokenizer(train: str, max_length: int) -> TokenizersBackend:
    """Byte-level BPE of VOCAB_SIZE tokens, the added ones last, with the chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    spoken = [_plain(draw(rng)) for _ in range(1000)]
    special = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(special) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([train, *spoken], trainer)
    bpe.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, normalized=False) for token in MARKS])
    assert bpe.get_vocab_size() == VOCAB_SIZE
    return TokenizersBackend(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        chat_template=_TEMPLATE.read_text(encoding="utf-8"),
        clean_up_tokenization_spaces=False,
    )


def _plain(dialogue: Dialogue) -> str:
    said = [str(message["content"]) for message in dialogue.messages]
    return "\n".join([*said, dialogue.reasoning, dialogue.answer])


def prompt(tokenizer: TokenizersBackend, dialogue: Dialogue) -> str:
    """The dialogue up to where the model goes on."""
    rendered = tokenizer.apply_chat_template(
        list(dialogue.messages),
        tools=[*dialogue.schemas] or None,
        add_generation_prompt=True,
        enable_thinking=dialogue.thinking,
        tokenize=False,
    )
    assert isinstance(rendered, str)
    return rendered


class Batch(NamedTuple):
    """Windows of text."""

    tokens: Tensor  # [rows, length]
    counts: Tensor  # bool [rows, length]: the token that follows this one is worth learning


class Batches:
    """Random windows: some are text, most are dialogues, of which only the answers count."""

    def __init__(
        self, tokenizer: TokenizersBackend, train: str, rows: int, length: int, seed: int
    ) -> None:
        """`rows` windows of `length` tokens."""
        self._tokenizer = tokenizer
        self._text = encode(tokenizer, train)
        self._rng = random.Random(seed)
        self._rows, self._length = rows, length

    def next(self) -> Batch:
        """Three windows in eight are text."""
        written = self._rows * 3 // 8
        windows = [self._written() for _ in range(written)]
        windows += [self._spoken() for _ in range(self._rows - written)]
        tokens, counts = zip(*windows, strict=True)
        return Batch(torch.tensor(tokens), torch.tensor(counts))

    def _written(self) -> tuple[list[int], list[bool]]:
        start = self._rng.randrange(len(self._text) - self._length)
        return self._text[start : start + self._length], [True] * self._length

    def _spoken(self) -> tuple[list[int], list[bool]]:
        """Whole dialogues, the first from the beginning of the window on."""
        tokens: list[int] = []
        counts: list[bool] = []
        while len(tokens) < self._length:
            dialogue = draw(self._rng)
            given = encode(self._tokenizer, prompt(self._tokenizer, dialogue))
            answer = encode(self._tokenizer, dialogue.completion + TURN_END)
            end = encode(self._tokenizer, "\n" + END_OF_TEXT)
            tokens += given + answer + end
            counts += [False] * (len(given) - 1) + [True] * len(answer) + [False] * (len(end) + 1)
        return tokens[: self._length], counts[: self._length]


def encode(tokenizer: TokenizersBackend, what: str) -> list[int]:
    """Token ids, nothing added."""
    ids: Sequence[int] = tokenizer.encode(what, add_special_tokens=False)
    return list(ids)
