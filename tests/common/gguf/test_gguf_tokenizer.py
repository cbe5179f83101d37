"""Tokenizers of GGUF files cut text as transformers does with the same file, and as the originals do
where that reads them otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.checkpoints.gguf_files import transformers_tokenizer
from support.checkpoints.tokenizer_kinds import CORPUS
from surestep_common.config import cache_dir
from surestep_common.errors import InvalidRequest
from surestep_common.gguf.header import read_header
from surestep_common.gguf.tokenizer import byte_letters, tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

CONTROL, NORMAL, USER_DEFINED, BYTE = 3, 1, 4, 6
SPECIAL, ADDED = ["<unk>", "<s>", "</s>", "<|im_start|>"], ["<think>", "<tool>"]
BYTE_LEVEL = ("default", "smollm", "llama-bpe", "qwen2", "dbrx")
ODD = [
    "",
    " ",
    "  12  345678 9",
    "a\r\n\n b\t\u00a0c\u3000d",
    "I'll DON'T we'Ve 'tis",
    "Ünïcödé naïve e\u0301 \u1e9b\u0323 ﬁ Ⅷ ½ ²³ १२३",
    "你好世界 привет こんにちは 👩‍👩‍👧‍👦 🏳️‍🌈",
    "<|im_start|>user\n<think>hi</think><tool><s></s><unk>",
    "\x00\x01\x7f\ufeff\u200b\ud7ff\uffff\U0010ffff",
    "x" * 50 + "?!..." * 9 + "_" * 9,
]
# What tokenizers cut at, and what they take for one thing: texts of these are odder than random ones.
PIECES = st.one_of(
    st.sampled_from([*ODD, *SPECIAL, *ADDED]),
    st.sampled_from([" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u2003", "\u3000"]),
    st.sampled_from(
        ["'s", "'S", "'ll", "'", "\u2019s", "1", "12", "1234", "\u0967", "\u00bd", "x1y"]
    ),
    st.sampled_from(
        ["the", " the", "The", "THE", "caf\u00e9", "cafe\u0301", "\u0301", "\u200d", "\ufe0f"]
    ),
    st.sampled_from(
        [
            "你好",
            "こ",
            "привет",
            "\u0e01\u0e33",
            "👩‍👩‍👧‍👦",
            "\x00",
            "\ufffd",
            "<|im_",
            "start|>",
            "!?",
            "_-",
        ]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)
DEFAULT = cache_dir() / "models" / "SmolLM2-135M-Instruct.gguf"


def written(
    path: Path,
    model: str,
    tokens: list[str],
    kinds: list[int],
    arch: str = "llama",
    **fields: Any,
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path: Path, pre: str, *more: str, **fields: Any) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())["model"]
    tokens = [*SPECIAL, *sorted(spec["vocab"], key=spec["vocab"].__getitem__), *ADDED, *more]
    kinds = (
        [CONTROL] * len(SPECIAL)
        + [NORMAL] * len(spec["vocab"])
        + [USER_DEFINED] * len([*ADDED, *more])
    )
    merges = [" ".join(merge) for merge in spec["merges"]]
    return written(path, "gpt2", tokens, kinds, tokenizer_pre=pre, token_merges=merges, **fields)


def sentencepiece(path: Path, **fields: Any) -> Path:
    words = {word for text in CORPUS for word in text.replace(" ", " \u2581").split()}
    pieces = sorted({w[a:b] for w in words for a in range(len(w)) for b in range(a + 2, a + 5)})
    pieces = sorted({piece for piece in pieces if len(piece) > 1}, key=lambda p: (len(p), p))[:300]
    letters = sorted({c for text in CORPUS for c in text if c != " "} | {"\u2581"})
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *bytes_, *pieces, *letters]
    kinds = [2, *[CONTROL] * 3, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 260 + [-float(i) for i in range(len(pieces) + len(letters))]
    return written(path, "llama", tokens, kinds, token_scores=scores, **fields)


class Pair:
    """Ours and transformers' tokenizer of one file."""

    def __init__(self, path: Path) -> None:
        self.files = tokenizer_of(read_header(path))
        self.ours = Tokenizer.from_str(json.dumps(self.files.tokenizer))
        self.theirs = transformers_tokenizer(path)

    def check(self, text: str, *specials: bool) -> None:
        for special in specials or (False, True):
            ours = self.ours.encode(text, add_special_tokens=special).ids
            theirs = self.theirs(text, add_special_tokens=special)["input_ids"]
            assert ours == theirs, (text, special)
            assert self.ours.decode(ours) == self.theirs.decode(ours, skip_special_tokens=True)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    path = tmp_path_factory.mktemp("tokenizers")
    files = {
        pre: byte_level(path / f"{pre}.gguf", pre, add_bos_token=pre == "llama-bpe")
        for pre in BYTE_LEVEL
    }
    files["llama"] = sentencepiece(path / "llama.gguf", add_bos_token=True)
    files["llama unspaced"] = sentencepiece(path / "unspaced.gguf", add_space_prefix=False)
    return {name: Pair(file) for name, file in files.items()}


def test_the_letters_of_bytes() -> None:
    assert byte_letters() == [bytes_to_unicode()[byte] for byte in range(256)]


@pytest.mark.parametrize("name", BYTE_LEVEL)
@pytest.mark.parametrize("text", ODD)
def test_odd_texts(pairs: dict[str, Pair], name: str, text: str) -> None:
    """Qwen's own tokenizer brings text into the normal form C; transformers leaves that out."""
    if name != "qwen2" or pairs[name].ours.normalizer.normalize_str(text) == text:
        pairs[name].check(text)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(BYTE_LEVEL), st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example("llama-bpe", "1234567 'll")
def test_any_text(pairs: dict[str, Pair], name: str, text: str) -> None:
    if name == "qwen2":
        text = pairs[name].ours.normalizer.normalize_str(text)
    pairs[name].check(text)


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(BYTE_LEVEL), TEXTS)
@example("smollm", "the 1234'll\u00a0 \n\nthe")
def test_texts_of_odd_pieces(pairs: dict[str, Pair], name: str, text: str) -> None:
    if name == "qwen2":
        text = pairs[name].ours.normalizer.normalize_str(text)
    pairs[name].check(text)


@pytest.fixture(scope="module")
def default() -> Pair:
    if not DEFAULT.is_file():
        pytest.skip("the default model is not on this machine")
    return Pair(DEFAULT)


@pytest.mark.rotates(3, turn=2)  # transformers takes seconds for it
@settings(deadline=None, max_examples=150)
@given(TEXTS)
def test_the_default_model(default: Pair, text: str) -> None:
    """Its whole vocabulary: 49152 tokens."""
    default.check(text)


@settings(deadline=None, max_examples=150)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60))
@example("the quick brown fox  jumps 你好 \n")
def test_any_text_of_sentencepiece(pairs: dict[str, Pair], text: str) -> None:
    """Where text begins with a space or a special token, transformers does as no original does."""
    if text and not text.startswith(" "):
        pairs["llama"].check(text, False)


def test_sentencepiece_puts_a_space_before_every_text(pairs: dict[str, Pair]) -> None:
    ours = pairs["llama"].ours
    assert ours.encode(" the").tokens[:1] == ["<s>"]
    assert "".join(ours.encode("<s>the", add_special_tokens=False).tokens) == "<s>\u2581the"
    assert "".join(ours.encode(" the", add_special_tokens=False).tokens) == "\u2581\u2581the"
    assert ours.decode(ours.encode(" the").ids) == " the"
    unspaced = pairs["llama unspaced"].ours
    assert "".join(unspaced.encode("the", add_special_tokens=False).tokens) == "the"
    assert unspaced.decode(unspaced.encode("the").ids) == "the"


def test_special_tokens_of_phi_3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    """Its tokenizer.json says so of all but a few, and llama.cpp does it; the files say nothing."""
    path = sentencepiece(tmp_path / "phi.gguf", arch="phi3")
    ours = Tokenizer.from_str(json.dumps(tokenizer_of(read_header(path)).tokenizer))
    for special, space in (("<|im_start|>", "\u2581"), ("</s>", "\u2581"), ("<s>", "\u2581" * 3)):
        ids = ours.encode(f"{special}  the", add_special_tokens=False).ids
        assert "".join(ours.id_to_token(id_) or "" for id_ in ids) == f"{special}{space}the"


def test_a_token_that_is_no_word_is_found_in_text(tmp_path: Path) -> None:
    """transformers spells those with spaces as bytes, and cuts them into pieces."""
    path = byte_level(tmp_path / "added.gguf", "qwen2", "<two words>", "<\uff5cUser\uff5c>")
    ours = Tokenizer.from_str(json.dumps(tokenizer_of(read_header(path)).tokenizer))
    assert ours.encode("a<two words><\uff5cUser\uff5c>").tokens == [
        "a",
        "<two words>",
        "<\uff5cUser\uff5c>",
    ]


def test_special_tokens_and_added_ones(pairs: dict[str, Pair]) -> None:
    for name in BYTE_LEVEL:
        tokens = pairs[name].ours.get_added_tokens_decoder().values()
        assert {token.content for token in tokens if token.special} == set(SPECIAL)
        assert {token.content for token in tokens if not token.special} == set(ADDED)
    config = pairs["llama-bpe"].files.config
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"pre": "tekken9"},
            r"tokenizer\.ggml\.pre tekken9 is not supported; supported: default, ",
        ),
        ({"token_merges": ["a", "b"]}, "merge a is none of its tokens"),
        ({"bos_token_id": 1 << 30}, "it has no token 1073741824"),
    ],
)
def test_refusals(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    tokens = [*SPECIAL, "a", "b"]
    fields = {"tokenizer_pre": fields.pop("pre", "default"), "token_merges": ["a b"], **fields}
    path = tmp_path / "bad.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, "ab"])
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidRequest, match=f"^cannot read {path}: {message}"):
        tokenizer_of(read_header(path))
