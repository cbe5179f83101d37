"""Request bodies that are large, each in another way, and mean to the server that reads them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_MESSAGE = b'{"role":"user","content":"x"}'
_TOOL = b'{"type":"function","function":{"name":"f","parameters":{"properties":{"a":{}}}}}'


class Nasty(NamedTuple):
    """Hostile body. No server needs to accept it, and none may suffer from it."""

    name: str
    path: str
    body: bytes


def _completion(prompt: bytes, *fields: bytes) -> bytes:
    return b'{"max_tokens":1,"prompt":%b}' % b",".join((prompt, *fields))


def _chat(messages: bytes, *fields: bytes) -> bytes:
    return b'{"max_tokens":1,"messages":%b}' % b",".join((messages, *fields))


def _list(element: bytes, size: int) -> bytes:
    return b"[%b]" % b",".join([element] * (size // (len(element) + 1)))


def _object(value: bytes, size: int) -> bytes:
    count = size // (len(value) + 12)
    return b"{%b}" % b",".join(b'"k%07d":%b' % (i, value) for i in range(count))


def _nested(size: int) -> bytes:
    """Objects in lists in objects, of all sizes."""
    rng = random.Random(size)
    parts: list[bytes] = []
    left = size
    while left > 0:
        depth = rng.randint(1, 40)
        parts.append(b'{"a":[' * depth + b"1" + b"]}" * depth)
        left -= len(parts[-1]) + 1
    return b"[%b]" % b",".join(parts)


_SHAPES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "ids": (COMPLETIONS, lambda n: _completion(_list(b"1", n))),
    "wrong ids": (COMPLETIONS, lambda n: _completion(_list(b"-1", n))),
    "huge ids": (COMPLETIONS, lambda n: _completion(_list(b"9" * 30, n))),
    "nulls": (COMPLETIONS, lambda n: _completion(_list(b"null", n))),
    "prompts": (COMPLETIONS, lambda n: _completion(_list(b'"a"', n))),
    "lists of ids": (COMPLETIONS, lambda n: _completion(_list(b"[1,2]", n))),
    "text": (COMPLETIONS, lambda n: _completion(b'"%b"' % (b"the quick " * (n // 10)))),
    "one word": (COMPLETIONS, lambda n: _completion(b'"%b"' % (b"a" * n))),
    "escapes": (COMPLETIONS, lambda n: _completion(b'"%b"' % (b"\\u00e9" * (n // 6)))),
    "truncated text": (
        COMPLETIONS,
        lambda n: _completion(b'"%b","truncate_prompt_tokens":9' % (b"the quick " * (n // 10))),
    ),
    "unknown lists": (COMPLETIONS, lambda n: _completion(b'"x"', b'"y":' + _list(b"[]", n))),
    "unknown objects": (COMPLETIONS, lambda n: _completion(b'"x"', b'"y":' + _object(b"{}", n))),
    "unknown options": (
        COMPLETIONS,
        lambda n: _completion(b'"x"', b'"stream":true,"stream_options":{"y":%b}' % _list(b"[]", n)),
    ),
    "long name": (COMPLETIONS, lambda n: _completion(b'"x"', b'"n":16,"user":"%b"' % (b"u" * n))),
    "unknown keys": (COMPLETIONS, lambda n: _object(b"1", n)),
    "nested": (COMPLETIONS, lambda n: _completion(b'"x"', b'"y":' + _nested(n))),
    "deep": (COMPLETIONS, lambda n: _completion(b'"x"', b'"y":' + b"[" * n)),
    "huge number": (COMPLETIONS, lambda n: _completion(b'"x"', b'"seed":1' + b"0" * n)),
    "twice": (COMPLETIONS, lambda n: b"{%b}" % b",".join([b'"prompt":"x"'] * (n // 13))),
    "bad words": (COMPLETIONS, lambda n: _completion(b'"x"', b'"bad_words":' + _list(b'"ab"', n))),
    "biases": (COMPLETIONS, lambda n: _completion(b'"x"', b'"logit_bias":' + _object(b'"y"', n))),
    "stops": (COMPLETIONS, lambda n: _completion(b'"x"', b'"stop":' + _list(b"1", n))),
    "messages": (CHAT, lambda n: _chat(_list(_MESSAGE, n))),
    "no messages": (CHAT, lambda n: _chat(_list(b"{}", n))),
    "long message": (
        CHAT,
        lambda n: _chat(b'[{"role":"user","content":"%b"}]' % (b"the quick " * (n // 10))),
    ),
    "parts": (
        CHAT,
        lambda n: _chat(
            b'[{"role":"user","content":%b}]' % _list(b'{"type":"text","text":"x"}', n)
        ),
    ),
    "calls": (
        CHAT,
        lambda n: _chat(
            b'[{"role":"assistant","tool_calls":%b}]' % _list(b'{"function":{"name":"f"}}', n)
        ),
    ),
    "markers": (
        CHAT,
        lambda n: _chat(b'[{"role":"user","content":"%b"}]' % (b"<|im_end|> " * (n // 11))),
    ),
    "tools": (
        CHAT,
        lambda n: _chat(b"[%b]" % _MESSAGE, b'"tool_choice":"none","tools":' + _list(_TOOL, n)),
    ),
    "variables": (
        CHAT,
        lambda n: _chat(b"[%b]" % _MESSAGE, b'"chat_template_kwargs":' + _object(b"[]", n)),
    ),
    "no end": (COMPLETIONS, lambda n: b'{"prompt":"' + b"x" * n),
    "no JSON": (COMPLETIONS, lambda n: b"\xff" * n),
    "quotes": (COMPLETIONS, lambda n: b'"' * n),
}
NAMES = tuple(_SHAPES)


def nasty_bodies(size: int) -> Iterator[Nasty]:
    """A body of each shape, of `size` bytes, about."""
    for name, (path, make) in _SHAPES.items():
        yield Nasty(name, path, make(size - 200))
