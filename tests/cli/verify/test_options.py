"""The command line of `verify`: a few flags of its own, and all of `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from surestep_cli.main import run
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.settings.vllm_flags import vllm_flags
from surestep_cli.verify.options import VerifyArguments, VerifyOptions, split
from surestep_common.config import Settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SURESTEP_SPECULATIVE_CONFIG", "SURESTEP_URL"):
        monkeypatch.delenv(name, raising=False)


def test_the_words_of_serve_pass_as_they_stand() -> None:
    words = ["m", "-tp", "2", "--max_tokens", "9", "--served-model-name", "a", "b"]
    words += ["--json", "--faults=killed", "-sc.method", "ngram"]
    own, rest = split(words)
    assert own == ["--max-tokens", "9", "--json", "--faults=killed"]
    assert rest == ["m", "-tp", "2", "--served-model-name", "a", "b", "-sc.method", "ngram"]


def test_no_flag_means_two_things() -> None:
    own = {name for name in VerifyOptions.model_fields if name not in Settings.model_fields}
    assert not own & ServeSettings.model_fields.keys()
    assert not {name.replace("_", "-") for name in own} & vllm_flags().by_name.keys()


@pytest.mark.parametrize("model", [[], ["m"]])
def test_drafts_are_added_where_speculation_is_turned_off(model: list[str]) -> None:
    added = VerifyArguments.of([*model, "--speculative-config", "none"])
    assert added.adds_drafts
    config = ServeSettings.of_flags(added.arguments).speculative_config
    assert config == {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    "words", [[], ["m"], ["m", "-sc.method", "mtp", "-sc.num_speculative_tokens", "1"]]
)
def test_what_is_served_is_verified(words: list[str]) -> None:
    given = VerifyArguments.of(words)
    assert not given.adds_drafts
    assert given.arguments == words


FOUR = ("killed", "stopped", "scheduler", "supervisor")


def test_faults() -> None:
    assert VerifyArguments.of(["m"]).options.faults == FOUR
    assert VerifyArguments.of(["m", "--faults", "none"]).options.faults == ()
    assert VerifyArguments.of(["m", "--faults", "stopped,stopped"]).options.faults == ("stopped",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "burned"], "no such fault as burned"),
        (["--reference", "/nowhere.jsonl"], "neither transformers, nor a URL, nor a file"),
        (["--report", "x.pdf"], "must end in .json or .html"),
        (["--report", "/nowhere/x.json"], "no file that can be written"),
        (["--prompts", "/nowhere"], "prompts"),
        (["--max-tokens", "1"], "max_tokens"),
        (["--max-tokens"], "max-tokens"),
        (["--temperature", "0"], "temperature"),
        (["--bogus"], "unknown flag '--bogus'"),
        (["--dtype", "int3"], "dtype"),
        (["--url", "ftp://localhost:8000"], "url"),
        (["--url", "http://x", "--dtype", "float32"], "--dtype: not with --url"),
        (["--url", "http://x", "--trust-remote-code"], "--trust-remote-code: not with --url"),
    ],
)
def test_what_cannot_be_had_is_told(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["verify", *words])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in told
    assert told.startswith("surestep verify: ")


def test_a_running_server_may_want_a_key_and_a_name() -> None:
    asking = VerifyArguments.of(["name", "--url", "http://x", "--api-key", "k"])
    assert (asking.serve.model, asking.serve.api_key) == ("name", (SecretStr("k"),))
    assert not asking.adds_drafts


def test_help_has_its_own_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["verify", "--help"]) == 0
    told = capsys.readouterr().out
    for name in VerifyOptions.model_fields.keys() - Settings.model_fields.keys() - {"json_output"}:
        assert f"--{name.replace('_', '-')}" in told
