from __future__ import annotations

import pytest
from surestep_common.errors import InvalidRequest
from surestep_gateway.request.parse import parse, refuse_unsupported
from surestep_gateway.request.protocol import Body, ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("kind", "raw", "param"),
    [
        (ChatRequest, b"{}", "messages"),
        (ChatRequest, b"[]", None),
        (ChatRequest, b"{", None),
        (ChatRequest, b"\xff", None),
        (ChatRequest, b'{"messages": [{"content": "x"}]}', "messages[0].role"),
        (ChatRequest, b'{"messages": [{"role": "user", "content": 3}]}', "messages[0].content"),
        (CompletionRequest, b'{"prompt": [1, -2]}', "prompt"),
        (CompletionRequest, b'{"prompt": "x", "temperature": NaN}', "temperature"),
        (CompletionRequest, b'{"prompt": "x", "stop": ["a", ""]}', "stop"),
        (
            CompletionRequest,
            b'{"prompt": "x", "speculative": {"num_tokens": -1}}',
            "speculative.num_tokens",
        ),
        (CompletionRequest, b'{"prompt": "\\ud800"}', None),
    ],
)
def test_the_parameter_at_fault_is_named(kind: type[Body], raw: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(kind, raw)
    named = caught.value.param
    assert named == param or (param and named is not None and named.startswith(param))


def test_unknown_names_are_accepted() -> None:
    body = parse(CompletionRequest, b'{"prompt": "x", "store": true, "metadata": {}}')
    assert body.model_extra == {"store": True, "metadata": {}}


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "x", "response_format": {"type": "text"}}',
        b'{"prompt": "x", "suffix": ""}',
        b'{"prompt": "x", "suffix": null, "guided_json": null}',
        b'{"prompt": "x", "tools": [], "tool_choice": "auto"}',
        b'{"prompt": "x", "tools": [{"type": "function"}], "tool_choice": "none"}',
        b'{"prompt": "x", "best_of": 2, "n": 2, "use_beam_search": false, "length_penalty": 1.0}',
        b'{"prompt": "x", "logit_bias": {}, "parallel_tool_calls": true}',
    ],
)
def test_parameters_that_ask_for_nothing_are_accepted(raw: bytes) -> None:
    refuse_unsupported(parse(CompletionRequest, raw))
