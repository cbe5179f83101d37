"""Parameters that other servers act on and this one does not: refused by name, never ignored.

A value that asks for nothing (null, an empty list, the neutral value) is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surestep_common.errors import InvalidRequest

from .protocol import Body

# Values that mean "off", besides null, false, 0, "" and empty containers.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
}
_UNSUPPORTED = frozenset(
    {
        "audio",
        "documents",
        "early_stopping",
        "echo",
        "functions",
        "function_call",
        "guided_choice",
        "guided_decoding_backend",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "guided_whitespace_pattern",
        "kv_transfer_params",
        "length_penalty",
        "logits_processors",
        "mm_processor_kwargs",
        "modalities",
        "prediction",
        "prompt_embeds",
        "response_format",
        "structural_tag",
        "structured_outputs",
        "suffix",
        "thinking_token_budget",
        "tool_choice",
        "use_beam_search",
        "web_search_options",
    }
)


# In requests for embeddings.
_NOT_EMBEDDED: Mapping[str, tuple[Any, ...]] = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "stream": (),
}


def refuse_for_embeddings(body: Body) -> None:
    """Raises InvalidRequest for the first parameter that asks for what is not implemented."""
    extra = body.model_extra or {}
    for name in sorted(_NOT_EMBEDDED.keys() & extra.keys()):
        if extra[name] and extra[name] not in _NOT_EMBEDDED[name]:
            raise InvalidRequest(f"'{name}' is not supported", param=name)


def refuse_unsupported(body: Body, n: int) -> None:
    """Raises InvalidRequest for the first parameter whose effect is not implemented."""
    extra = body.model_extra or {}
    for name in sorted(_UNSUPPORTED & extra.keys()):
        value = extra[name]
        if value and value not in _NEUTRAL.get(name, ()):
            raise InvalidRequest(f"'{name}' is not supported", param=name)
    if extra.get("tools") and extra.get("tool_choice") != "none":
        raise InvalidRequest(
            "'tools' are not supported unless 'tool_choice' is \"none\"", param="tools"
        )
    if extra.get("best_of") not in (None, n):
        raise InvalidRequest(f"'best_of' is not supported unless equal to n={n}", param="best_of")
