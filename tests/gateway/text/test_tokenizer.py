from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import tiny_tokenizer
from surestep_common.errors import InvalidRequest
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

TINY = tiny_tokenizer.build()
IDS = st.lists(st.integers(0, tiny_tokenizer.VOCAB_SIZE - 1), max_size=40)


def sentencepiece() -> RustTokenizer:
    """A Llama-style tokenizer: U+2581 for spaces, byte tokens for what has no token."""
    words = ["<unk>", "<s>", "</s>", "\u2581hello", "\u2581world", "!", "\u2581"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = RustTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in words[:3]])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


@given(ids=IDS, skip=st.booleans())
def test_byte_level_text_is_that_of_the_library(ids: list[int], skip: bool) -> None:
    ours = Tokenizer(TINY).decode(ids, skip_special_tokens=skip)
    assert ours == TINY.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_text_is_that_of_the_library() -> None:
    rust = sentencepiece()
    text = [*(3, 4, 5, 6), *(7 + byte for byte in "é🙂".encode()), 3]
    for ids in (text, [1, *text, 2], [4], []):
        for skip in (True, False):
            ours = Tokenizer(rust).decode(ids, skip_special_tokens=skip)
            assert ours == rust.decode(ids, skip_special_tokens=skip)


def test_batches_encode_like_single_texts() -> None:
    tokenizer = Tokenizer(TINY)
    text = "the quick brown fox " * 1000
    short, ids = tokenizer.encode(Texts(["the", text], add_special_tokens=False))
    assert short == tokenizer.encode_now("the", add_special_tokens=False)
    assert ids == tokenizer.encode_now(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_added_tokens_may_be_long() -> None:
    rust = tiny_tokenizer.build("<|" + "x" * 2000 + "|>")
    assert len(Tokenizer(rust).special_ids) == 4


def test_ids_beyond_the_tokenizer_are_empty_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.piece(tiny_tokenizer.VOCAB_SIZE + 5) == b""
    assert tokenizer.token(tiny_tokenizer.VOCAB_SIZE + 5) == ""


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json not found"):
        Tokenizer.load(tmp_path)


def test_a_folder_with_another_kind_of_tokenizer_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.model is not read here.*AutoTokenizer"):
        Tokenizer.load(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="cannot read"):
        Tokenizer.load(tmp_path)


def test_an_unknown_decoder_is_refused() -> None:
    rust = tiny_tokenizer.build()
    rust.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="WordPiece"):
        Tokenizer(rust)
