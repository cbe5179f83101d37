"""Compare the vocabularies of two models, token by token.

Equal sizes say little: models of one size may number other tokens. What tokenizer.json lists is
compared as data; no text is read with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest
from surestep_common.model_files import read, read_object

logger = logging.getLogger(__name__)


class Vocabulary(NamedTuple):
    """Tokens of a model."""

    folder: Path  # of its tokenizer.json
    size: int  # rows of its embedding, those of no token included

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    def tokens(self) -> dict[int, str]:
        """Return the tokens by id. Raises InvalidRequest for a file that does not list them."""
        whole = read_object(self.tokenizer)
        model, added = whole.get("model"), whole.get("added_tokens") or []
        listed = model.get("vocab") if isinstance(model, dict) else None
        try:
            named = {**_named(listed), **{it["content"]: it["id"] for it in added}}
            return {
                id_: token
                for token, id_ in named.items()
                if 0 <= id_ < self.size and token != f"[PAD{id_}]"  # GGUF's name for no token
            }
        except (TypeError, ValueError, KeyError) as error:
            message = f"{self.tokenizer} lists no tokens"
            raise InvalidRequest(message, param="speculative_config") from error


def _named(listed: Any) -> Mapping[str, int]:
    """Return the ids of tokens that are listed with them, or in their order with scores."""
    if isinstance(listed, dict):
        return listed
    return {piece: id_ for id_, (piece, _) in enumerate(listed)}


def check_vocabulary(draft: Vocabulary, model: Vocabulary) -> None:
    """Raise InvalidRequest, naming the first token that differs, unless both have the same tokens.

    Sizes may differ by rows of no token. Without both tokenizers the sizes must be equal.
    """
    if not (draft.tokenizer.is_file() and model.tokenizer.is_file()):
        if draft.size != model.size:
            raise _refused(f"{draft.size} tokens, the model has {model.size}")
        logger.info("a tokenizer.json is missing: only the sizes of vocabularies are compared")
        return
    if draft.size == model.size and read(draft.tokenizer) == read(model.tokenizer):
        return
    one, other = draft.tokens(), model.tokens()
    if one == other:
        return
    first = min(id_ for id_ in one.keys() | other.keys() if one.get(id_) != other.get(id_))
    raise _refused(f"{_shown(one, first)} as token {first}, the model has {_shown(other, first)}")


def _shown(tokens: Mapping[int, str], id_: int) -> str:
    return repr(tokens[id_]) if id_ in tokens else "none"


def _refused(difference: str) -> InvalidRequest:
    return InvalidRequest(
        f"its vocabulary is another: it has {difference}", param="speculative_config"
    )
