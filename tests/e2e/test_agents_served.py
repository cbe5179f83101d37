"""Requests of real coding agents, served under a published tokenizer as the agents sent them.

The model is random: a bias has it end its answers, and calls are forced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints.published import make_published_checkpoint
from support.clients.recorded_agents import Recorded, recorded
from support.processes.stack import serve

pytestmark = pytest.mark.timeout(300)
FLAGS = (
    *("--max-num-seqs", "4", "--kv-cache-memory", "0.05", "--speculative-config", "none"),
    *("--max-model-len", "32768", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-parser", "qwen3"),
)
COMPACT = ("--structured-outputs-config", '{"disable_any_whitespace": true}')
END = {"151645": 95.0}  # <|im_end|>
LIMITS = {"/v1/responses": "max_output_tokens"}
# Forced, and what the call is to the client.
FORCED: dict[str, tuple[Any, dict[str, Any]]] = {
    "codex-first": (
        {"type": "function", "name": "exec_command"},
        {"type": "function_call", "name": "exec_command"},
    ),
    "codex-namespace-result": (
        {"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"},
        {"type": "function_call", "name": "close_agent", "namespace": "multi_agent_v1"},
    ),
    "codex-patch-result": (
        {"type": "custom", "name": "apply_patch"},
        {"type": "custom_tool_call", "name": "apply_patch"},
    ),
    "codex-code-mode-result": (
        {"type": "custom", "name": "exec", "namespace": "functions"},
        {"type": "custom_tool_call", "name": "exec", "namespace": "functions"},
    ),
    "claude-first": ({"type": "tool", "name": "Bash"}, {"type": "tool_use", "name": "Bash"}),
    "cline-first": (
        {"type": "function", "function": {"name": "run_commands"}},
        {"name": "run_commands"},
    ),
    "opencode-first": ({"type": "function", "function": {"name": "bash"}}, {"name": "bash"}),
    "qwen-first": (
        {"type": "function", "function": {"name": "run_shell_command"}},
        {"name": "run_shell_command"},
    ),
}
LAST = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.",  # completed, or incomplete where the limit cuts it
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("agents")
    model = make_published_checkpoint(folder / "model", "qwen3", max_position=32768)
    with (
        serve(model, folder / "logs", *FLAGS, *COMPACT) as stack,
        httpx.Client(base_url=stack.url, timeout=240) as client,
    ):
        yield client


def limited(one: Recorded, **more: Any) -> dict[str, Any]:
    """The request, for the one model there is, and with a short answer."""
    sent = {name: value for name, value in one.body.items() if name != "model"}
    limit = LIMITS.get(one.path, "max_tokens")
    return sent | {limit: 60, "logit_bias": END, "temperature": 0} | more


@pytest.mark.parametrize("one", recorded(), ids=lambda one: one.name)
@pytest.mark.rotates(2)
def test_answered_as_it_was_sent(client: httpx.Client, one: Recorded) -> None:
    assert one.body.get("stream"), "agents stream"
    response = client.post(one.path, json=limited(one))
    assert response.status_code == 200, response.text
    assert response.text.strip().split("\n\n")[-1].startswith(LAST[one.path])
    assert '"error":{' not in response.text


@pytest.mark.parametrize(
    "one", [one for one in recorded() if one.name in FORCED], ids=lambda one: one.name
)
def test_a_call_has_the_form_that_the_agent_knows(client: httpx.Client, one: Recorded) -> None:
    choice, expected = FORCED[one.name]
    body = limited(one, tool_choice=choice, stream=False, stream_options=None)
    body["chat_template_kwargs"] = {"enable_thinking": False}
    response = client.post(one.path, json=body)
    assert response.status_code == 200, response.text
    found = called(one.path, response.json())
    assert {key: found.get(key) for key in expected} == expected, json.dumps(found)


def called(path: str, answer: Any) -> dict[str, Any]:
    """The first call of an answer."""
    match path:
        case "/v1/responses":
            items = [item for item in answer["output"] if item["type"].endswith("_call")]
        case "/v1/messages":
            items = [block for block in answer["content"] if block["type"] == "tool_use"]
        case _:
            calls = answer["choices"][0]["message"]["tool_calls"]
            items = [call["function"] for call in calls]
    assert items, json.dumps(answer)[:2000]
    return dict(items[0])
