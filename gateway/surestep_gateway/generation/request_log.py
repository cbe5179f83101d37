"""Logging of requests, for operators who enable it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import orjson

from surestep_gateway.context import Gateway
from surestep_gateway.request.protocol import Body

from .generation import Generation, Origin

logger = logging.getLogger(__name__)

# Left out of a body: texts, which are in the prompt, and the salt, which must stay secret.
_LEFT_OUT = {"messages", "prompt", "input", "tools", "documents", "cache_salt"}


def log_request(gateway: Gateway, generation: Generation) -> None:
    """Log a request that generates."""
    ids = [prompt.token_ids for prompt in generation.prompts]
    log_body(gateway, generation.id, generation.origin, generation.body, ids)


def log_body(
    gateway: Gateway,
    name: str,
    origin: Origin,
    body: Body,
    prompts: Sequence[Sequence[int]],
) -> None:
    """Log the parameters of a request, and at DEBUG its first prompt; cut at --max-log-len."""
    if not gateway.settings.enable_log_requests:
        return
    limit = gateway.settings.max_log_len
    fields = type(body).model_fields.keys() - _LEFT_OUT
    asked = body.model_dump(mode="json", exclude_unset=True, include=fields)
    logger.info(
        "received %s from %s: prompts=%d tokens=%d %s",
        name,
        origin.caller.name,
        len(prompts),
        sum(map(len, prompts)),
        orjson.dumps(asked).decode()[:limit],
    )
    if logger.isEnabledFor(logging.DEBUG):
        ids = prompts[0][:limit]  # a token has a character or more
        text = gateway.tokenizer.decode(list(ids), skip_special_tokens=False)
        logger.debug("prompt of %s: %r", name, text[:limit])
