"""The tokenizer of a model folder, on the `tokenizers` library alone.

`transformers` is left out on purpose: importing it costs seconds and, where torch is installed,
loads torch.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from surestep_common.errors import InvalidRequest
from surestep_common.model_files import read, read_json
from tokenizers import Tokenizer as RustTokenizer

from surestep_gateway.text.special_tokens import NamedTokenizer, SpecialTokens
from surestep_gateway.text.text_bounds import longest_token, solid_length, swallows_space

logger = logging.getLogger(__name__)

_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "vocab.json")  # of tokenizers


class Texts(NamedTuple):
    """Texts to encode together."""

    texts: Sequence[str]
    add_special_tokens: bool
    named: bool = False  # special tokens are written by their secret names

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts))


_GREETING = Texts(["hello"], add_special_tokens=True)  # any tokenizer can encode it


class Tokenizer:
    """Turns text into token ids and, token by token, back into bytes."""

    def __init__(self, rust: RustTokenizer) -> None:
        rust.no_truncation()
        rust.no_padding()
        self._rust = rust
        self._added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        decoders = _decoders(rust)
        self._to_bytes: Callable[[str], bytes] = _byte_rule(decoders)
        self._pieces: dict[int, bytes] = {}
        self.size = rust.get_vocab_size(with_added_tokens=True)
        self.base_size = rust.get_vocab_size(with_added_tokens=False)
        self.strips_first_space = any(map(_strips_first_space, decoders))
        self.special = SpecialTokens(rust)
        self.definition = rust.to_str()  # to make another one of
        spec = orjson.loads(self.definition)
        self._longest = longest_token(spec)
        self._solid_only = swallows_space(spec)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`. Raise InvalidRequest naming the file when that fails."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise InvalidRequest(f"{path} not found{_remedy(folder)}")
        definition = read(path)
        try:
            made = cls(RustTokenizer.from_buffer(definition))
            made.encode(_GREETING)
        except BaseException as error:
            raise _complaint(error, f"cannot read {path}") from error
        return made

    @cached_property
    def named(self) -> NamedTokenizer:
        """The tokenizer for text that contains special tokens, made on first use, which takes
        time.
        """
        return NamedTokenizer(self.definition, self.special)

    def encode(self, texts: Texts) -> list[list[int]]:
        """Return the token ids of each text. The library lets other threads run meanwhile."""
        rust = self.named.rust if texts.named else self._rust
        add = texts.add_special_tokens
        try:
            encoded = rust.encode_batch_fast(list(texts.texts), add_special_tokens=add)
        except BaseException as error:
            raise _complaint(error, "the model's tokenizer fails") from error
        return [one.ids for one in encoded]

    @cached_property
    def ending(self) -> tuple[int, ...]:
        """Ids appended to every text that gets special tokens."""
        encoded = self._rust.encode("a", add_special_tokens=True)
        added = takewhile(
            lambda pair: pair[1],
            zip(encoded.ids[::-1], encoded.special_tokens_mask[::-1], strict=True),
        )
        return tuple(id_ for id_, _ in added)[::-1]

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a short `text`, on the calling thread."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def most_chars(self, num_tokens: int) -> int | None:
        """Return the characters of the longest text of `num_tokens`; None if unbounded."""
        return None if self._longest is None else num_tokens * self._longest

    def length(self, text: str) -> int:
        """Return the number of characters of `text` for which its tokens must stand."""
        return solid_length(text) if self._solid_only else len(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a whole sequence."""
        pieces = [self.piece(i) for i in ids if not (skip_special_tokens and self.is_special(i))]
        text = b"".join(pieces).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves the token out of the text."""
        return token_id in self.special_ids

    def is_marker(self, text: str) -> bool:
        """Return whether a text is a token that grammars take for no text.

        llguidance does so with added tokens that are special or look like `<...>`.
        """
        id_ = self.id(text)
        if id_ is None or id_ not in self._added:
            return False
        return self.is_special(id_) or (text.startswith("<") and text.endswith(">"))

    def in_grammars(self, text: str) -> str:
        """Return the name of a marker in a grammar of Lark; empty for one that is text there."""
        if not self.is_marker(text):
            return ""
        return text if text.startswith("<") and text.endswith(">") else f"<[{self.id(text)}]>"

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text, not necessarily whole characters."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._make_piece(token_id)
        return found

    def _make_piece(self, token_id: int) -> bytes:
        token = self._rust.id_to_token(token_id)
        if token is None:  # models pad their vocabulary beyond the tokenizer's
            return b""
        if token_id in self._added:
            return str(token).encode()
        return self._to_bytes(token)

    def word(self, token_id: int) -> str:
        """Return the text of a token without the space before it."""
        return self.piece(token_id).decode(errors="replace").strip()

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return the part of a text that its first tokens are made of."""
        offsets = self._rust.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]

    def id(self, token: str) -> int | None:
        """Return the id of a token spelled like this in the vocabulary."""
        found: int | None = self._rust.token_to_id(token)
        return found

    def token(self, token_id: int) -> str:
        """Return the vocabulary's own spelling of a token, such as `Ġthe`."""
        return self._rust.id_to_token(token_id) or ""


def _complaint(error: BaseException, what: str) -> BaseException:
    """Return the error for a fault of the library: it raises bare Exception, and a panic is not
    even that.
    """
    is_panic = type(error).__name__ == "PanicException"
    if isinstance(error, InvalidRequest) or not (is_panic or isinstance(error, Exception)):
        return error
    return InvalidRequest(f"{what}: {error}")


def _remedy(folder: Path) -> str:
    """Return advice about a folder that has no tokenizer.json."""
    others = [name for name in _OTHER_FORMATS if (folder / name).is_file()]
    if not others:
        return ": the model folder needs a fast tokenizer"
    return (
        f": {others[0]} is not read here. Where transformers is installed, this writes the file: "
        f"python -c \"from transformers import AutoTokenizer as T; T.from_pretrained('{folder}')"
        f".save_pretrained('{folder}')\""
    )


def _decoders(rust: RustTokenizer) -> list[dict[str, Any]]:
    """Return the parts of the `decoder` entry of tokenizer.json."""
    state = rust.decoder.__getstate__() if rust.decoder is not None else b"{}"
    decoder: dict[str, Any] = json.loads(state)
    parts: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return parts


def _byte_rule(decoders: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Return how a tokenizer with these decoders spells bytes."""
    kinds = {part.get("type", "none") for part in decoders}
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if kinds & {"ByteFallback", "Metaspace"}:
        return _sentencepiece_bytes
    raise InvalidRequest(f"tokenizer.json: decoder {sorted(kinds)} is not supported")


def _strips_first_space(decoder: Mapping[str, Any]) -> bool:
    """Return whether decoding removes the space that encoding has prepended."""
    match decoder:
        case {"type": "Strip", "content": " ", "start": start}:
            return bool(start)
        case {"type": "Metaspace"}:
            return bool(decoder.get("prepend_scheme", "always") != "never")
    return False


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's spelling of bytes: printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # a token that was not spelled in the byte alphabet stands for itself
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def check_vocabulary(folder: Path, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest when ordinary tokens of the tokenizer are outside the model's
    vocabulary.

    Added tokens beyond it, which fine-tunes leave behind, cause a warning: requests that contain
    one will be refused.
    """
    size = _vocabulary_of(folder / "config.json")
    if size is None:
        return
    if tokenizer.base_size > size:
        raise InvalidRequest(
            f"{folder / 'tokenizer.json'} has {tokenizer.base_size} tokens, but the vocabulary of "
            f"the model in {folder / 'config.json'} has {size}"
        )
    if tokenizer.size > size:
        count = tokenizer.size - size
        logger.warning("%d added tokens are beyond the model's vocabulary of %d", count, size)


def _vocabulary_of(path: Path) -> int | None:
    """Return the vocabulary size in config.json; None if unreadable, which the worker reports."""
    try:
        config: Any = read_json(path)
        size = config.get("text_config", config).get("vocab_size")
    except (InvalidRequest, AttributeError):
        return None
    return size if isinstance(size, int) else None
