"""Lines of streams and lists of models, as servers send them."""

from __future__ import annotations

from typing import Any

import pytest
from surestep_cli.api.responses import DONE, model_card, payload_of
from surestep_common.errors import InvalidRequest


@pytest.mark.parametrize(
    ("line", "payload"),
    [
        (b'data: {"a": 1}\n', b'{"a": 1}'),
        (b'data:{"a": 1}\r\n', b'{"a": 1}'),
        (b"data: [DONE]\n", DONE),
        (b"data:\n", b""),
        (b"\n", None),
        (b": a sign of life\n", None),
        (b"event: data:\n", None),
    ],
)
def test_only_data_lines_carry_something(line: bytes, payload: bytes | None) -> None:
    assert payload_of(line) == payload


def test_a_model_is_found_by_its_name_or_is_the_first() -> None:
    models = {"data": [{"id": "one"}, {"id": "two", "max_model_len": 64}]}
    assert model_card(models)["id"] == "one"
    assert model_card(models, "two") == {"id": "two", "max_model_len": 64}
    with pytest.raises(InvalidRequest, match="no model 'three' is served: one, two"):
        model_card(models, "three")


@pytest.mark.parametrize("models", [None, [], {}, {"data": None}, {"data": []}, {"data": ["x"]}])
def test_a_server_without_models_is_told_in_words(models: Any) -> None:
    with pytest.raises(InvalidRequest, match="no model is served"):
        model_card(models)
    with pytest.raises(InvalidRequest, match="no model 'x' is served: there is none"):
        model_card(models, "x")
