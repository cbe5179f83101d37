"""A tokenizer of 160 tokens, for the models of the parity matrix: ASCII, and pieces of JSON."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
_CORPUS = (
    '{"name":"Ada","age":36,"ok":true}',
    '{"name":"Bob","age":41,"ok":false}',
    '{"city": "Oslo", "tags": ["cold", "north"]}',
    "alpha beta gamma delta alphabet",
)


def save(folder: Path, vocab: int = 160) -> Path:
    """Write tokenizer.json with as many tokens; returns the folder."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=[chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"],
        show_progress=False,
        min_frequency=1,
    )
    bpe.train_from_iterator(_CORPUS, trainer)
    assert bpe.get_vocab_size() == vocab
    bpe.save(str(folder / "tokenizer.json"))
    return folder
