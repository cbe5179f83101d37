"""Several models on one command line: what each service is told, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from pydantic_settings import SettingsError
from surestep_cli.serve.model_source import ModelFolder
from surestep_cli.serve.wiring import gateway_environ, wiring
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.settings.model_list import each_model
from surestep_worker.config import WorkerSettings


def listed(path: Path, *entries: dict[str, object]) -> str:
    path.write_text(yaml.safe_dump({"models": list(entries)}))
    return str(path)


def environs(*arguments: str) -> list[tuple[ServeSettings, Mapping[str, str]]]:
    """The settings of each model, and the variables of its services."""
    each = each_model(ServeSettings.of_flags(arguments))
    return [
        (one, wiring(one, ModelFolder(str(one.model), Path("/m") / str(one.model)))) for one in each
    ]


def use(monkeypatch: pytest.MonkeyPatch, environ: Mapping[str, str]) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_words_are_models() -> None:
    assert [one.model for one in each_model(ServeSettings.of_flags(["a", "b", "c"]))] == [*"abc"]
    (only,) = each_model(ServeSettings.of_flags(["a"]))
    assert (only.model, only.models) == ("a", ())


def test_flags_of_one_reach_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"max_num_seqs": 3, "tool_call_parser": "hermes", "hf_overrides": {"is_matryoshka": True}}
    file = listed(tmp_path / "m.yaml", {"model": "a"}, {"name": "b", "model": "b", **own})
    flags = "--models", file, "--max-num-seqs", "9", "--dtype", "bf16", "--api-key", "k"
    wired = environs(*flags)
    for (_, environ), seqs, overrides in zip(
        wired, (9, 3), (None, own["hf_overrides"]), strict=True
    ):
        with monkeypatch.context() as context:
            use(context, environ)
            worker = WorkerSettings.load([])
        assert (worker.max_num_seqs, worker.dtype) == (seqs, "bfloat16")
        assert worker.hf_overrides == overrides
    use(monkeypatch, gateway_environ(wired))
    first, second = GatewaySettings.load([]).each
    assert (first.model_names, second.model_names) == (("a",), ("b",))
    assert (first.tool_call_parser, second.tool_call_parser) == (None, "hermes")
    assert (first.hf_overrides, second.hf_overrides) == (None, own["hf_overrides"])
    assert first.scheduler_url != second.scheduler_url
    assert first.port == second.port == int(wired[0][1]["SURESTEP_PORT"])
    assert len(first.api_key) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["a", "b", "--served-model-name", "x"], "--served-model-name: one model's own"),
        (["a", "b", "--revision", "main"], "--revision: one model's own"),
        (["a", "--models", "FILE"], "a: it stands in --models"),
        (["--models", "WRONG"], "unknown setting 'max_num_seqz'"),
        (["--models", "WRONG"], "max_n: Input should be greater than 0"),
    ],
)
def test_refusals(tmp_path: Path, arguments: list[str], reason: str) -> None:
    files = {
        "FILE": listed(tmp_path / "m.yaml", {"model": "a"}),
        "WRONG": listed(
            tmp_path / "w.yaml", {"model": "a", "max_num_seqz": 1}, {"model": "b", "max_n": 0}
        ),
    }
    with pytest.raises(SettingsError) as refused:
        ServeSettings.of_flags([files.get(word, word) for word in arguments])
    assert reason in str(refused.value)
