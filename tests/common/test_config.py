"""Settings: flag > variable > file > default, one line per error, values pass on to children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict
from surestep_common.config import Settings, child_environ, human_int, without_cublas_workspace


class Service(Settings):
    """A service among others."""

    port: int = Field(default=8000, ge=1, le=65535, description="port to listen on")
    caching: bool = Field(default=True, description="share prefixes")
    options: dict[str, Any] | None = Field(default=None, description="JSON")
    names: list[str] = Field(default=[], description="several")
    key: SecretStr | None = Field(default=None, description="secret")


class Everything(Service):
    """The command that knows all keys."""

    model_config = SettingsConfigDict(extra="forbid", cli_prog_name="everything")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "surestep.yaml"
    path.write_text("port: 3\ncaching: false\n")
    return path


def test_defaults() -> None:
    assert Service.load([]) == Service(port=8000, caching=True)


def test_flag_beats_variable_beats_file(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURESTEP_CONFIG", str(config_file))
    assert Service.load([]).port == 3
    monkeypatch.setenv("SURESTEP_PORT", "2")
    assert Service.load([]).port == 2
    assert Service.load(["--port", "1"]).port == 1
    assert Service.load(["--port", "1"]).caching is False


def test_flag_names_the_file(config_file: Path) -> None:
    assert Service.load(["--config", str(config_file)]).port == 3


def test_file_keys_may_look_like_flags(config_file: Path) -> None:
    config_file.write_text("log-level: DEBUG\n")
    assert Service.load(["--config", str(config_file)]).log_level == "DEBUG"


def test_a_mapping_replaces_the_files_mapping(config_file: Path) -> None:
    config_file.write_text("options: {method: ngram, size: 4}\n")
    settings = Service.load(["--config", str(config_file), "--options", '{"method": "none"}'])
    assert settings.options == {"method": "none"}


def test_switches_have_two_flags() -> None:
    assert Service.load(["--no-caching"]).caching is False
    assert Service.load(["--caching"]).caching is True


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        Service.load([]).port = 1


def test_services_ignore_the_keys_of_others(config_file: Path) -> None:
    config_file.write_text("port: 3\nsomebody_elses: 1\n")
    assert Service.load(["--config", str(config_file)]).port == 3


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("prot: 3", "everything: config file {path}: unknown setting 'prot'\n"),
        ("port: 0", "everything: config file {path}: port: Input should be greater than or equal"),
        ("port: [", "everything: config file {path}: while parsing"),
        ("- port", "everything: config file {path}: expected keys and values\n"),
    ],
)
def test_a_wrong_file_is_refused(
    config_file: Path, capsys: pytest.CaptureFixture[str], content: str, line: str
) -> None:
    config_file.write_text(content)
    assert refusal(["--config", str(config_file)], capsys).startswith(line.format(path=config_file))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--port", "0"],
            "everything: port: Input should be greater than or equal to 1, got '0' (--port or ",
        ),
        (["--prot", "1"], "everything: unknown flag '--prot': did you mean --port?\n"),
        (["--xyzzy=1"], "everything: unknown flag '--xyzzy'\n"),
        (["--config", "/nowhere"], "everything: config file /nowhere: [Errno 2]"),
        (["--options", "{"], "everything: "),
    ],
)
def test_a_wrong_flag_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert refusal(arguments, capsys).startswith(line)


def test_a_wrong_variable_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURESTEP_PORT", "many")
    assert "SURESTEP_PORT" in refusal([], capsys)


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that is printed, and no more is, with the exit status of a usage error."""
    with pytest.raises(SystemExit) as ended:
        Everything.load(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_help_comes_from_the_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Everything.load(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "port to listen on (default: 8000) [env: SURESTEP_PORT]" in " ".join(text.split())


def test_values_pass_on_to_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = Service(
        port=7, caching=False, options={"a": [1]}, names=["x", "y"], key=SecretStr("s")
    )
    for name, value in parent.environ().items():
        monkeypatch.setenv(name, value)
    assert Service.load([]) == parent


def test_defaults_are_not_passed_on() -> None:
    assert Service.load([]).environ() == {}


def test_a_child_sees_no_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURESTEP_CONFIG", "file")
    monkeypatch.setenv("UNRELATED", "1")
    environ = child_environ({"SURESTEP_PORT": "1"})
    assert {k: v for k, v in environ.items() if k.startswith("SURESTEP_")} == {"SURESTEP_PORT": "1"}
    assert environ["UNRELATED"] == "1"


def test_a_workspace_that_somebody_wants_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_cublas_workspace()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert without_cublas_workspace()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        (" 32k ", 32_000),
        ("32K", 32_768),
        ("25.6k", 25_600),
        ("1.5G", 3 << 29),
        ("-1", -1),
    ],
)
def test_numbers_as_people_write_them(text: str, number: int) -> None:
    assert human_int(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "-2k", "1e3", "3kk", "three"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match="is no whole number"):
        human_int(text)
