"""The tokenizer of a GGUF file, as the tokenizer.json that Hugging Face's library reads.

A file has tokens, merges and the name of the rule by which text is split before it is merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .header import Header, refuse, shown

_PREFIX = "tokenizer.ggml"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # kinds of tokens
_SPACE = "\u2581"
_MAX_SPLIT = 1000  # characters of a token that merges may lead to
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class _Split(NamedTuple):
    """Split of text for byte-level merges, and its companions."""

    pattern: str | None  # None: as GPT-2 does
    single_digits: bool = False
    normal_form: bool = False  # NFC, before anything else
    whole_words: bool = False  # a word that is a token is not put together by merges
    begins: bool = False  # text begins with the token for that unless the file says otherwise


_GPT2 = _Split(None)
_DIGITS = _Split(None, single_digits=True)
_LLAMA3 = _Split(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, begins=True)
_QWEN2 = _Split(rf"{_WORDS}|\p{{N}}|{_REST}", normal_form=True)
_SPLITS = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "dbrx": _Split(_LLAMA3.pattern),  # Phi-4 has it
}
# Special tokens of Phi-3 that leave the white space behind them alone.
_TIGHT = frozenset(("<unk>", "<s>", "<|endoftext|>"))


class TokenizerFiles(NamedTuple):
    """The content of tokenizer.json and tokenizer_config.json."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]


def tokenizer_of(header: Header) -> TokenizerFiles:
    """Return the tokenizer. Raises InvalidRequest for one that is damaged or of an unknown kind."""
    tokens = header.items(f"{_PREFIX}.tokens", str)
    kinds = header.items(f"{_PREFIX}.token_type", int)
    if not tokens or (kinds and len(kinds) != len(tokens)):
        refuse(header.path, f"it has {len(tokens)} tokens and {len(kinds)} kinds of them")
    model = header.text(f"{_PREFIX}.model")
    if model == "gpt2":
        parts, begins = _byte_level(header, tokens, kinds)
    elif model == "llama":
        parts, begins = _sentencepiece(header, tokens), True
    else:
        refuse(
            header.path,
            f"tokenizer {shown(model)} is not supported as GGUF; supported: gpt2, llama",
        )
    special = _special_tokens(header, tokens)
    ends = {
        "bos": _flag(header, "add_bos_token", begins) and "bos" in special,
        "eos": _flag(header, "add_eos_token", False) and "eos" in special,
    }
    added = _added_tokens(tokens, kinds, special.values())
    if model == "llama" and header.metadata.get("general.architecture") == "phi3":
        for token in added:  # the others take it, which files do not say
            token["rstrip"] = token["special"] and token["content"] not in _TIGHT
    frame = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    processor = _template({name: special[name] for name, wanted in ends.items() if wanted}, tokens)
    return TokenizerFiles(frame | parts | {"post_processor": processor}, _config(special, ends))


def _byte_level(
    header: Header, tokens: Sequence[str], kinds: Sequence[int]
) -> tuple[dict[str, Any], bool]:
    """Return model and rules of a tokenizer that merges bytes, and whether text gets a begin."""
    name = header.text(f"{_PREFIX}.pre", "default")
    if name not in _SPLITS:
        known = ", ".join(_SPLITS)
        refuse(header.path, f"{_PREFIX}.pre {shown(name)} is not supported; supported: {known}")
    rule = _SPLITS[name]
    steps: list[dict[str, Any]] = []
    if rule.single_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if rule.pattern is not None:
        pattern = {"Regex": rule.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append(_bytes(use_regex=rule.pattern is None))
    vocabulary = _spelled(tokens, kinds)
    merges = _merges(header, vocabulary)
    model = _merging(vocabulary, merges) | {"ignore_merges": rule.whole_words}
    parts = {
        "normalizer": {"type": "NFC"} if rule.normal_form else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _bytes(use_regex=True),
        "model": model,
    }
    return parts, rule.begins


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _spelled(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    """Return the vocabulary with every plain token spelled in the alphabet of bytes.

    Some files hold a few as text. Control tokens and added ones are text.
    """
    letters = byte_letters()
    alphabet = set(letters)
    spelled: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        is_text = bool(kinds) and kinds[id_] in (_CONTROL, _USER_DEFINED)
        if not is_text and not alphabet.issuperset(token):
            token = "".join(letters[byte] for byte in token.encode())
        spelled.setdefault(token, id_)
    return spelled


def byte_letters() -> list[str]:
    """Return the letter of each byte: its own in Latin-1 where that is visible, else one from
    U+0100 on, in order (Radford et al., 2019)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _sentencepiece(header: Header, tokens: Sequence[str]) -> dict[str, Any]:
    """Return model and rules of a tokenizer that merges characters, spaces being U+2581."""
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    unknown = header.metadata.get(f"{_PREFIX}.unknown_token_id", 0)
    if f"{_PREFIX}.merges" in header.metadata:
        merges = _merges(header, vocabulary)
    else:
        merges = _merges_by_score(header, tokens, vocabulary)
    spaced = _flag(header, "add_space_prefix", True)
    rules = [{"type": "Prepend", "prepend": _SPACE}] if spaced else []
    back: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spaced:
        back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*rules, to_space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": _merging(vocabulary, merges)
        | {"unk_token": _token(header, tokens, unknown), "fuse_unk": True, "byte_fallback": True},
    }


def _merging(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the file's own merges, the first of them first."""
    merges = []
    for line in header.items(f"{_PREFIX}.merges", str):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            refuse(header.path, f"merge {shown(line)} is none of its tokens")
        merges.append((left, right))
    return merges


def _merges_by_score(
    header: Header, tokens: Sequence[str], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Return the merges that lead to each token, those to a token of a higher score first."""
    scores = header.items(f"{_PREFIX}.scores", float)
    if len(scores) != len(tokens):
        refuse(header.path, f"it has {len(tokens)} tokens and {len(scores)} scores of them")
    found = []
    for token, score in zip(tokens, scores, strict=True):
        if len(token) > _MAX_SPLIT:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if vocabulary.keys() >= set(pair)]
        found += [(-score, -len(left), left, right) for left, right in known]
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:2])]


def _special_tokens(header: Header, tokens: Sequence[str]) -> dict[str, str]:
    ids = {name: header.metadata.get(f"{_PREFIX}.{key}_token_id") for name, key in _SPECIAL.items()}
    return {name: _token(header, tokens, id_) for name, id_ in ids.items() if id_ is not None}


def _token(header: Header, tokens: Sequence[str], id_: Any) -> str:
    if type(id_) is int and 0 <= id_ < len(tokens):
        return tokens[id_]
    return refuse(header.path, f"it has no token {shown(str(id_))}")


def _added_tokens(
    tokens: Sequence[str], kinds: Sequence[int], special: Iterable[str]
) -> list[dict[str, Any]]:
    """Return the tokens that text is searched for first; special ones among them are no text."""
    named = set(special)
    added = []
    for id_, (token, kind) in enumerate(zip(tokens, kinds or [0] * len(tokens), strict=True)):
        is_special = token in named or kind in (_CONTROL, _UNKNOWN)
        if token and (is_special or kind == _USER_DEFINED):
            about = {"id": id_, "content": token, "special": is_special}
            added.append(
                about | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            )
    return added


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.metadata.get(f"{_PREFIX}.{name}", default)
    return value if isinstance(value, bool) else default


def _template(ends: dict[str, str], tokens: Sequence[str]) -> dict[str, Any] | None:
    """Return the rule that adds special tokens at the begin and the end of a text."""
    if not ends:
        return None

    def added(name: str, kind: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": ends[name], "type_id": kind}}] if name in ends else []

    def text(name: str, kind: int) -> list[dict[str, Any]]:
        sequence = {"Sequence": {"id": name, "type_id": kind}}
        return [*added("bos", kind), sequence, *added("eos", kind)]

    about = {
        token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
        for token in ends.values()
    }
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": list(chain(text("A", 0), text("B", 1))),
        "special_tokens": about,
    }


def _config(special: dict[str, str], ends: dict[str, bool]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": token for name, token in special.items()},
        **{f"add_{name}_token": wanted for name, wanted in ends.items()},
    }
