"""The server under test: one started as `serve` would start it, or a running one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from pydantic import SecretStr
from rich.console import Console
from surestep_common.errors import SurestepError
from surestep_common.gguf import is_gguf, model_folder
from surestep_common.model_files import read_object

from surestep_cli.api.http import model_card
from surestep_cli.api.metrics import Metrics
from surestep_cli.api.sessions import get_json, get_text
from surestep_cli.serve.fetch import fetch

from .options import VerifyArguments

_LONGEST = 2048  # tokens, of a server without a limit of its own


class ServerUnderTest(NamedTuple):
    """The server's URL; `pid` is the launcher's, None for a server not started here."""

    url: str
    api_key: SecretStr | None
    certificate: Path | None = None
    pid: int | None = None


class About(NamedTuple):
    """The server's facts about itself."""

    model: str
    temperature: float | None  # default of requests, None if that is 0 or unknown
    max_model_len: int | None
    is_surestep: bool
    num_slots: int = 0  # requests that run at once; 0 = unknown
    speculative_config: dict[str, Any] | None = None  # in use; None = unknown


def shortened(asking: VerifyArguments, console: Console) -> int | None:
    """Return a --max-model-len that prompts reach within seconds, for a model that has a longer one
    and where the flags ask for none.
    """
    if not asking.may_be_shortened:
        return None
    try:
        folder = fetch(asking.serve, console).model.path
        folder = model_folder(folder) if is_gguf(folder) else folder
        config = read_object(folder / "config.json")
    except SurestepError:
        return None  # the server tells what is wrong with it
    own = config.get("text_config", config).get("max_position_embeddings") or 0
    return _LONGEST if own > _LONGEST else None


async def about(session: aiohttp.ClientSession, name: str | None) -> About:
    """Describe the model called `name`, or the first one. Raise Unavailable and InvalidRequest."""
    card = model_card(await get_json(session, "v1/models"), name)
    defaults = card.get("default_sampling_params") or {}
    try:
        metrics = Metrics(await get_text(session, "metrics"))
    except SurestepError:
        metrics = Metrics("")
    ours, slots = "surestep:steps_total" in metrics, int(metrics.total("surestep:slots"))
    longest = card.get("max_model_len")
    config = await _config_in_use(session) if ours else None
    return About(card["id"], defaults.get("temperature") or None, longest, ours, slots, config)


async def _config_in_use(session: aiohttp.ClientSession) -> dict[str, Any] | None:
    """Return the configuration that a server of ours uses; None where it tells operators only."""
    try:
        schedulers = (await get_json(session, "overview"))["schedulers"]
    except SurestepError:
        return None
    models = [scheduler["model"] for scheduler in schedulers if scheduler["model"] is not None]
    return json.loads(models[0]["speculative_config"] or "{}") if models else None
