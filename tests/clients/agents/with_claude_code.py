"""Claude Code (@anthropic-ai/claude-code), over the Messages API"""

from __future__ import annotations

import json

from clients.agents.agent import ADA, JSON_ASKED, KEY_REFUSED, SCHEMA, Agent, result
from clients.checks import REPORT, TALK, WEATHER, Server, works

agent = Agent("Claude Code")
EVENTS = ("--output-format", "stream-json", "--verbose", "--include-partial-messages")


@works("chat")
def chat(server: Server) -> None:
    agent.chat(server)


@works("streaming")
def streaming(server: Server) -> None:
    agent.stream(server, *EVENTS)


@works("tools")
def tools(server: Server) -> None:
    done = agent.run(server, WEATHER, "--allowedTools=Bash(cat:*)")
    assert done.output == f"{REPORT}\n", done.told


@works("JSON schemas")
def json_schemas(server: Server) -> None:
    flags = ("--output-format", "json", "--json-schema", json.dumps(SCHEMA))
    assert result(agent.run(server, JSON_ASKED, *flags))["structured_output"] == ADA


@works("errors")
def errors(server: Server) -> None:
    done = agent.run(server, TALK, key="wrong")
    assert KEY_REFUSED in done.output, done.told
    done = agent.run(server, TALK, model="nonesuch")
    assert "selected model (nonesuch)" in done.output, done.told


@works("usage")
def usage(server: Server) -> None:
    counts = result(agent.run(server, TALK, "--output-format", "json"))["usage"]
    assert counts["output_tokens"] == 8
    assert counts["cache_read_input_tokens"] > 10_000  # of the same prompt, asked before


@works("cancelling")
def cancelling(server: Server) -> None:
    agent.cancel(server)
