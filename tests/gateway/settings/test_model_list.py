"""Lists of models: what an entry may say, and that it says it of its model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic_settings import SettingsError
from surestep_gateway.settings.config import GatewaySettings

A = {"name": "a", "model": "/m/a", "scheduler_url": "h:1"}
B = {"name": "b, bee", "model": "/m/b", "scheduler_url": "h:2,h:3", "tool_call_parser": "hermes"}
TOML = """
[[models]]
name = "a"
model = "/m/a"
scheduler_url = "h:1"

[[models]]
name = "b, bee"
model = "/m/b"
scheduler_url = "h:2,h:3"
tool_call_parser = "hermes"
"""


def load(path: Path, *models: dict[str, Any], flags: tuple[str, ...] = ()) -> GatewaySettings:
    path.write_text(yaml.safe_dump({"models": list(models)}))
    return GatewaySettings.load(["--models", str(path), *flags])


@pytest.mark.parametrize("suffix", ["yaml", "toml"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"models.{suffix}"
    path.write_text(TOML if suffix == "toml" else yaml.safe_dump({"models": [A, B]}))
    settings = GatewaySettings.load(["--models", str(path), "--max-n", "3", "--api-key", "k"])
    one, two = settings.each
    assert (one.model_names, two.model_names) == (("a",), ("b", "bee"))
    assert (one.scheduler_url, two.scheduler_url) == (("h:1",), ("h:2", "h:3"))
    assert (one.tool_call_parser, two.tool_call_parser) == (None, "hermes")
    assert (one.max_n, two.max_n, bool(two.api_keys())) == (3, 3, True)
    assert settings.model == Path("/m/a")


def test_one_model_is_a_list_of_one() -> None:
    settings = GatewaySettings.load(["--model", "/m/a"])
    assert settings.each == (settings,)


def test_what_is_said_of_one_is_not_said_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry beats flags, variables and file, for its model; the others keep theirs."""
    monkeypatch.setenv("SURESTEP_MAX_LOGPROBS", "7")
    b = B | {"max_logprobs": 2, "hf_overrides": {"is_matryoshka": True}, "load_on_demand": True}
    one, two = load(tmp_path / "m.yaml", A, b, flags=("--response-role", "x")).each
    assert (one.max_logprobs, two.max_logprobs) == (7, 2)
    assert (one.hf_overrides, two.hf_overrides) == (None, {"is_matryoshka": True})
    assert (one.comes_and_goes, two.comes_and_goes) == (False, True)
    assert one.response_role == two.response_role == "x"


@pytest.mark.parametrize(
    ("models", "flags", "reason"),
    [
        ([A, B | {"name": "a"}], (), "models: two have the name 'a'"),
        ([A, B | {"name": "x,a"}], (), "models: two have the name 'a'"),
        ([A, B | {"scheduler_url": "h:1"}], (), "models: two have the scheduler_url 'h:1'"),
        ([A, {"model": "/m/b"}, {"model": "/m/c"}], (), "two have the scheduler_url"),
        ([A, B | {"port": 1}], (), "models: b, bee: port: the same for all"),
        ([A, B | {"api_key": "x"}], (), "models: b, bee: api_key: the same for all"),
        ([A, {"name": "c"}], (), "models: c: model: the folder, file or hub id is missing"),
        ([A, B | {"max_n": 0}], (), "models: b, bee: max_n: "),
        ([A, B], ("--served-model-name", "x"), "--served-model-name: one model's own"),
        ([A, B], ("--tokenizer", "/t"), "--tokenizer: one model's own"),
    ],
)
def test_wrong_lists_are_refused(
    tmp_path: Path,
    models: list[dict[str, Any]],
    flags: tuple[str, ...],
    reason: str,
) -> None:
    with pytest.raises(SettingsError) as refused:
        _ = load(tmp_path / "m.yaml", *models, flags=flags).each
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no list `models`"),
        ("models: {}", "has no list `models`"),
        ("models: [1, 2]", "each model has keys of its own"),
        ("models: [", "config file"),
    ],
)
def test_files_without_a_list_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as end:
        GatewaySettings.load(["--models", str(path)])
    assert end.value.code == 2
    assert reason in capsys.readouterr().err
