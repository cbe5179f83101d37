"""Secrets are secret by the type of their settings: nothing that is shown or logged has them."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError
from surestep_cli.api.http import ServerUrl
from surestep_cli.chat.conversation import Conversation
from surestep_cli.commands import RestartWorkers
from surestep_cli.main import Surestep
from surestep_cli.serve.serving import key_of
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_cli.verify.command import _FLAGS
from surestep_cli.verify.server import ServerUnderTest
from surestep_common.config import Settings, load, secret_fields
from surestep_common.errors import InvalidRequest
from surestep_gateway.api_keys import read_keys
from surestep_gateway.apis.responses.redis_store import RedisStore
from surestep_gateway.settings.config import GatewaySettings
from surestep_scheduler.config import SchedulerSettings

SECRET = "hunter2-and-more-of-it"
VALUES = {
    "api_key": f"first,{SECRET}",
    "admin_api_key": SECRET,
    "grpc_api_key": SECRET,
    "grpc_secret": SECRET,
    "hf_token": SECRET,
    "responses_store": f"redis://user:{SECRET}@cache:6379/0",
    "kv_offloading_store": f"rediss://user:{SECRET}@cache:6379/1",
}
NO_SECRETS = {
    "ssl_keyfile",
    "grpc_tls_key",
    "api_key_file",
    "admin_api_key_file",
    "grpc_secret_file",
    "share_prefix_cache_between_keys",
}


def test_every_setting_that_sounds_like_a_secret_is_one() -> None:
    for cls in (ServeSettings, GatewaySettings, SchedulerSettings, ServerUrl, RestartWorkers):
        sounding = {
            name
            for name in cls.model_fields
            if any(word in name for word in ("key", "secret", "password", "hf_token"))
        }
        assert sounding - NO_SECRETS <= set(secret_fields(cls))
    assert set(secret_fields(ServeSettings)) == set(VALUES)
    assert {"api_key", "admin_api_key", "hf_token"} <= set(secret_fields(Surestep))
    assert not _FLAGS & set(VALUES)  # those that the report of `surestep verify` tells


def test_settings_show_no_secret_and_hand_them_to_services() -> None:
    settings = ServeSettings.model_validate({"model": "m", **VALUES})
    for shown in (repr(settings), str(settings), settings.model_dump_json(), f"{settings!r:}"):
        assert "hunter2" not in shown
    environ = settings.environ()
    assert json.loads(environ["SURESTEP_API_KEY"]) == ["first", SECRET]
    assert json.loads(environ["SURESTEP_GRPC_API_KEY"]) == [SECRET]
    assert environ["SURESTEP_RESPONSES_STORE"] == VALUES["responses_store"]
    assert environ["SURESTEP_GRPC_SECRET"] == environ["SURESTEP_ADMIN_API_KEY"] == SECRET
    assert "SURESTEP_HF_TOKEN" not in environ


WRONG: dict[str, Any] = {
    "api_key": f'["{SECRET}',
    "admin_api_key": [SECRET],
    "grpc_api_key": [[SECRET]],
    "grpc_secret": f"{SECRET}\n{SECRET}",
    "hf_token": [SECRET],
    "responses_store": f"http://user:{SECRET}@cache",
    "kv_offloading_store": f"http://user:{SECRET}@cache",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("another", [{}, {"port": "eighty"}], ids=["alone", "beside another"])
def test_wrong_settings_are_refused_without_their_secrets(
    name: str, another: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"  # which is YAML too
    file.write_text(json.dumps({**VALUES, name: WRONG[name], **another}))
    with pytest.raises(SystemExit) as ended:
        ServeSettings.load(["m", "--config", str(file)])
    told = capsys.readouterr().err + "".join(traceback.format_exception(ended.value))
    assert another or name in told or name.replace("_", "-") in told
    assert "hunter2" not in told


@pytest.mark.parametrize("cls", [GatewaySettings, ServeSettings, SchedulerSettings])
def test_a_traceback_of_wrong_settings_has_no_secret(cls: type[Settings]) -> None:
    """Nor does it have all settings, which the fault of two together shows otherwise."""
    for given in ({**VALUES, "port": "x", "log_level": "x"}, {**VALUES, **WRONG, "model": "m"}):
        with pytest.raises(ValidationError) as caught:
            cls.model_validate(given)
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_wrong_settings_of_commands_are_told_without_their_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURESTEP_URL", "ftp://x")
    for command in (["status"], ["chat"], ["bench"]):
        with pytest.raises(SystemExit):
            load(Surestep, [*command, "--api-key", SECRET])
    assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize("password", ["hunter2/more", "hunter2]x", "[hunter2", "a:hunter2#/"])
def test_a_password_that_makes_no_url_is_not_repeated(password: str) -> None:
    """Python names what stands where a port is expected."""
    with pytest.raises(InvalidRequest, match="redis://USER:PASSWORD@HOST") as caught:
        RedisStore(f"redis://user:{password}@cache:6379/x", 1, 1.0)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_keys_that_are_in_use_have_no_repr(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{SECRET} name=a\n")
    settings = ServeSettings.model_validate({"model": "m", "api_key": SECRET})
    key = key_of(settings)
    assert isinstance(key, SecretStr)
    restart = RestartWorkers(admin_api_key=key)
    for shown in (
        *read_keys(file),
        ServerUnderTest("http://x", key),
        Conversation("http://x", key, {}, 1.0),
        restart,
    ):
        assert "hunter2" not in repr(shown)
