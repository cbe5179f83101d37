"""Defaults of requests, from generation_config.json and from the operator."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.checkpoints.tiny import make_tiny_checkpoint
from surestep_common.errors import InvalidRequest
from surestep_common.request_params import neutral, shown
from surestep_proto.sampling_pb2 import SamplingDefaults
from surestep_worker.checkpoint.model_folder import ConfigFiles, Replacements, fingerprint_of
from surestep_worker.config import WorkerSettings
from surestep_worker.configs.generation_config import check_override, sampling_defaults

FILE = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "max_new_tokens": 512,
    "do_sample": False,
    "eos_token_id": [1, 2],
    "transformers_version": "5.0.0",
}
SHOWN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 1.5,
    "frequency_penalty": -0.5,
    "max_tokens": 512,
}
PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
PLAIN = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, **PENALTIES}


def read(file: dict[str, Any], source: str = "auto", **override: Any) -> dict[str, float]:
    check_override(override)
    return shown(sampling_defaults(file, source, override))


def test_a_checkpoint_without_defaults_has_neutral_ones() -> None:
    assert read({}) == read({"eos_token_id": 3}) == shown(neutral()) == PLAIN


def test_everything_the_file_says_holds_and_do_sample_is_not_read() -> None:
    assert read(FILE) == SHOWN


def test_neutral_values_on_demand() -> None:
    assert read(FILE, "vllm") == PLAIN


def test_null_and_minus_one_are_off() -> None:
    assert read({"temperature": None, "top_k": -1, "top_p": None}) == PLAIN
    assert read(FILE, top_k=None, max_new_tokens=None) == {
        name: value for name, value in {**SHOWN, "top_k": 0}.items() if name != "max_tokens"
    }


def test_the_operator_beats_the_file() -> None:
    assert read(FILE, temperature=0.2)["temperature"] == 0.2
    assert read(FILE, temperature=0.2)["top_k"] == 20
    assert read(FILE, "vllm", temperature=0.2) == {**PLAIN, "temperature": 0.2}


def test_a_length_that_the_operator_gives_is_a_limit() -> None:
    assert "max_tokens_limit" not in read(FILE)
    assert read(FILE, max_new_tokens=64) == {**SHOWN, "max_tokens": 64, "max_tokens_limit": 64}
    assert read(FILE, "/another/folder")["max_tokens_limit"] == 512


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1 and must be from 0"),
        ({"temperature": "0.6"}, "temperature is '0.6' and must be a number"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 1.5}, "top_k is 1.5 and must be a whole number"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p is 0 and must be more than 0"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": True}, "max_new_tokens"),
    ],
)
def test_what_cannot_hold_is_refused_with_a_way_out(file: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        sampling_defaults(file, "auto", {})
    assert "generation_config.json" in str(caught.value)
    assert "--generation-config vllm leaves it out" in str(caught.value)
    assert sampling_defaults(file, "vllm", {}) == neutral()
    with pytest.raises(ValueError, match=message):
        check_override(file)


@pytest.mark.parametrize(
    ("given_name", "hint"),
    [("temprature", "did you mean temperature?"), ("colour", "there are: temperature, top_k")],
)
def test_unknown_names_are_refused(given_name: str, hint: str) -> None:
    with pytest.raises(ValidationError, match=f"{given_name} is not known; {hint}"):
        WorkerSettings(override_generation_config={given_name: 1})


def test_names_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert read({}, do_sample=False, eos_token_id=4) == PLAIN
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "do_sample, eos_token_id: without effect" in record.getMessage()


def test_one_line_in_the_log_unless_all_is_neutral(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        read({"temperature": 1.0, "top_k": 0})
        assert caplog.records == []
        read({"temperature": 0.6})
    (record,) = caplog.records
    assert "{'temperature': 0.6}, from generation_config.json" in record.getMessage()


def test_another_folder_takes_the_place_of_the_models_file(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", hidden=32)
    other = tmp_path / "other"
    with pytest.raises(InvalidRequest, match="other"):
        ConfigFiles.read(model, Replacements(other))
    other.mkdir()
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    settings = WorkerSettings(model=model, generation_config=str(other))
    assert settings.replacements == Replacements(other)
    files = ConfigFiles.read(model, settings.replacements)
    assert files.generation == {"temperature": 0.3}
    assert WorkerSettings(model=model).replacements == Replacements()


def test_defaults_are_no_part_of_the_voice_but_the_end_of_a_turn_is(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "model", hidden=32)
    before = fingerprint_of(model)
    file = model / "generation_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "temperature": 0.5}))
    assert fingerprint_of(model) == before
    file.write_text(json.dumps({**said, "eos_token_id": [7]}))
    assert fingerprint_of(model) != before


VALUES = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(sorted(FILE)), VALUES))
@example({"top_p": 3.5e-116})  # 0 in float32
def test_any_file_gives_values_that_can_hold_or_is_refused(file: dict[str, Any]) -> None:
    try:
        defaults = sampling_defaults(file, "auto", {})
    except InvalidRequest:
        return
    assert isinstance(defaults, SamplingDefaults)
    assert 0 <= defaults.temperature <= 1e6
    assert 0 < defaults.top_p <= 1
    assert 0 <= defaults.min_p <= 1
    assert 0 < defaults.repetition_penalty <= 100
    assert abs(defaults.presence_penalty) <= 2
    assert abs(defaults.frequency_penalty) <= 2
