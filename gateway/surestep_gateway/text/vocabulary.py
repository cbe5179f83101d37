"""The check that tokenizer and weights of a model folder belong together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from surestep_common.errors import InvalidRequest
from surestep_common.model_files import read_json

from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


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
