"""Requests of real coding agents under published templates: nothing they say is lost, nothing fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.clients.prompt_reader import TEMPLATES, Reader
from support.clients.recorded_agents import Recorded, recorded
from surestep_gateway.apis.messages.request import draft_message
from surestep_gateway.apis.responses.request import draft_response
from surestep_gateway.request.prepare import draft_chat
from surestep_gateway.text.service import Kind

pytestmark = pytest.mark.timeout(300)  # packages are fetched the first time

DRAFTS: dict[str, Kind[Any]] = {
    "/v1/chat/completions": draft_chat,
    "/v1/messages": draft_message,
    "/v1/responses": draft_response,
}
WITHOUT_RESULTS = ("gemma3",)  # templates that refuse the role `tool`


@pytest.mark.parametrize("one", recorded(), ids=lambda one: one.name)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_model_reads_all_of_it(
    readers: Callable[[str], Reader], template: str, one: Recorded
) -> None:
    if template in WITHOUT_RESULTS and one.name.endswith("-result"):
        pytest.skip("no such role")
    prompt = readers(template).read(DRAFTS[one.path], **one.body | {"model": None})
    assert "You are" in prompt
    assert "x-anthropic-billing-header" not in prompt
    if one.name.endswith("-result"):
        told = "picture", "patch", "namespace"
        assert "3 degrees" in prompt or any(word in one.name for word in told)
    if template == "qwen3":  # the others show no tools
        assert [name for name in one.tools() if f'"{name}"' not in prompt] == []
