"""Lists of models, as servers send them."""

from __future__ import annotations

from typing import Any

import pytest
from surestep_cli.api.http import model_card
from surestep_common.errors import InvalidRequest


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
