from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from surestep_gateway.settings.config import GatewaySettings


def settings(**values: object) -> GatewaySettings:
    return GatewaySettings.model_validate({"model": Path("/models/tiny")} | values)


def test_the_folder_names_the_model() -> None:
    assert settings().model_names == ("tiny",)
    assert settings(served_model_name="a, b").model_names == ("a", "b")


def test_a_model_in_a_cache_of_the_hub_is_named_by_its_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0f1e"
    snapshot.mkdir(parents=True)
    link = tmp_path / "served"
    link.symlink_to(snapshot)
    assert settings(model=link).model_names == ("Qwen/Qwen3-0.6B",)
    assert settings(model=snapshot.parent).model_names == ("snapshots",)


@pytest.mark.parametrize("given", ["k1,k2", '["k1", "k2"]', ["k1", "k2"]])
def test_lists_come_in_three_spellings(given: object) -> None:
    assert settings(api_key=given).api_key == (SecretStr("k1"), SecretStr("k2"))


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURESTEP_API_KEY", "secret")
    monkeypatch.setenv("SURESTEP_PORT", "9000")
    got = settings()
    assert (got.api_key, got.port) == ((SecretStr("secret"),), 9000)


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        settings().port = 1


def test_parsers_are_chosen_by_name() -> None:
    chosen = settings(
        reasoning_parser="qwen3", tool_call_parser="hermes", enable_auto_tool_choice=True
    )
    assert (chosen.reasoning_parser, chosen.tool_call_parser) == ("qwen3", "hermes")
    with pytest.raises(ValidationError, match=r"must be one of .*openai_gptoss, qwen3"):
        settings(reasoning_parser="qwen4")
    with pytest.raises(ValidationError, match=r"must be .*hermes.* openai, .*pythonic"):
        settings(tool_call_parser="xml")


@pytest.mark.parametrize(("reasoning", "calls"), [("openai_gptoss", "hermes"), ("qwen3", "openai")])
def test_parsers_of_one_format_go_together(reasoning: str, calls: str) -> None:
    with pytest.raises(ValidationError, match="neither goes with another parser"):
        settings(reasoning_parser=reasoning, tool_call_parser=calls)
    assert settings(reasoning_parser="openai_gptoss", tool_call_parser="openai")
    assert settings(reasoning_parser=reasoning) != settings(tool_call_parser=calls)
