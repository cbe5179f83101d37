"""Bounds on the text that a token can stand for: text beyond them is not tokenised."""

from __future__ import annotations

from typing import Any

import orjson

# Characters of a text that its normal form may have one of. Canonical composition joins at most
# four (UAX #15: no canonical decomposition is longer).
_NORMALIZERS = {
    "ByteLevel": 1,
    "Lowercase": 1,
    "NFC": 4,
    "NFD": 1,
    "NFKC": 4,
    "NFKD": 1,
    "Prepend": 1,
}
_SPLITTERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


def longest_token(spec: dict[str, Any]) -> int | None:
    """Return the most characters that a token stands for; None if that is unbounded.

    `spec` is the content of tokenizer.json. Where an added token swallows the white space beside
    it, white space does not count: see `solid_length`.
    """
    shrinks = _shrinkage(spec["normalizer"])
    if shrinks is None or _drops_text(spec["pre_tokenizer"]) or _loses_unknown(spec):
        return None
    vocab = spec["model"]["vocab"]
    tokens = vocab if isinstance(vocab, dict) else (token for token, _ in vocab)
    added = (token["content"] for token in spec["added_tokens"])
    return shrinks * max(map(len, (*tokens, *added)), default=1)


def swallows_space(spec: dict[str, Any]) -> bool:
    """Return whether some added token stands for the white space beside it too."""
    return any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"])


def solid_length(text: str) -> int:
    """Return the number of characters that are not white space."""
    return sum(map(len, text.split()))


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """Return the most characters that become one; None if that is unbounded."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        product = 1
        for part in normalizer["normalizers"]:
            shrinks = _shrinkage(part)
            if shrinks is None:
                return None
            product *= shrinks
        return product
    if kind == "Replace":
        found = normalizer["pattern"].get("String")
        return len(found) if found and normalizer["content"] else None
    return _NORMALIZERS.get(kind)


def _drops_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        return any(map(_drops_text, pre_tokenizer["pretokenizers"]))
    dropped = pre_tokenizer.get("behavior") == "Removed"
    return dropped or pre_tokenizer["type"] not in _SPLITTERS


def _loses_unknown(spec: dict[str, Any]) -> bool:
    """Return whether a run of unknown characters becomes one token, or none."""
    model = spec["model"]
    if model.get("byte_fallback"):
        return False
    if model["type"] != "BPE":
        return True
    if model["unk_token"]:
        return bool(model["fuse_unk"])
    return b'"ByteLevel"' not in orjson.dumps([spec["normalizer"], spec["pre_tokenizer"]])
