"""Request bodies of vLLM's tokenizer endpoints."""

from __future__ import annotations

from .protocol import Body, TemplateFields, TokenIds


class TokenizeBody(Body):
    """POST /tokenize, the prompt form"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(TemplateFields):
    """POST /tokenize, the messages form"""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds
