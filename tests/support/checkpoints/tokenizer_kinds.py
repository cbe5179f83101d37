"""Tokenizers of every kind that chat models come with, small; all of them have special tokens."""

from __future__ import annotations

from collections.abc import Callable

from support.checkpoints import tiny_tokenizer
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")  # added, and not special
CORPUS = (
    "the quick brown fox jumps over the lazy dog and the dog sleeps on the warm stone",
    "user assistant system tool <b>bold</b> <s>struck</s> a|b im_end im_start end of turn",
    "Grüße, привет, 你好, naïve café 0123456789 <<>>||__//",
) * 8


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: special tokens are added, and no part of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added(tokenizer)


def trained_with_specials() -> Tokenizer:
    """The same with its special tokens in the vocabulary."""
    return _with_added(tiny_tokenizer.build(*SPECIAL[:3]))


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: U+2581 for spaces, bytes for what has no token.

    Its merges lead to a special token, as they do where one was frequent in the training text.
    """
    alphabet = sorted({c for text in CORPUS for c in text.replace(" ", "\u2581")} | {"\u2581"})
    pieces = ["th", "the", "\u2581the", "</", "</s", "</s>", "<s", "<s>", "im", "im_", "en", "end"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("<", "/"), ("</", "s"), ("</s", ">")]
    merges += [("<", "s"), ("<s", ">"), ("i", "m"), ("im", "_"), ("e", "n"), ("en", "d")]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, *pieces]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    )
    return _with_added(tokenizer)


def unigram() -> Tokenizer:
    """As T5 and its kin have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=list(SPECIAL), unk_token="<unk>"
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in PLAIN])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "trained_with_specials": trained_with_specials,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
}
