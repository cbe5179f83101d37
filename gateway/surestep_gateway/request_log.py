"""Requests in the log, for operators who want them there."""

from __future__ import annotations

import logging

import orjson

from .context import Gateway
from .generation import Generation

logger = logging.getLogger(__name__)

_TEXTS = {"messages", "prompt", "tools", "documents"}  # of a body; what they came to is the prompt


def log_request(gateway: Gateway, generation: Generation) -> None:
    """What a request asks for, and at DEBUG its first prompt; cut at --max-log-len."""
    limit = gateway.settings.max_log_len
    asked = generation.body.model_dump(mode="json", exclude_unset=True, exclude=_TEXTS)
    logger.info(
        "received %s from %s: %d prompt tokens, %d sequences, %s",
        generation.id,
        generation.origin.caller.name,
        generation.usage.prompt,
        len(generation.sequences),
        orjson.dumps(asked).decode()[:limit],
    )
    if logger.isEnabledFor(logging.DEBUG):
        ids = generation.prompts[0].token_ids[:limit]  # a token has a character or more
        text = gateway.tokenizer.decode(list(ids), skip_special_tokens=False)
        logger.debug("prompt of %s: %r", generation.id, text[:limit])
