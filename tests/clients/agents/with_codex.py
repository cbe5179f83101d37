"""Codex (@openai/codex), over the Responses API"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from clients.agents.agent import ADA, JSON_ASKED, KEY_REFUSED, SCHEMA, Agent, Done
from clients.checks import REPORT, SENTENCE, TALK, WEATHER, Server, works

SERVER = Path(__file__).with_name("mcp_server.py")
agent = Agent(
    *("Codex", "~/.codex/config.toml", "--json", "--skip-git-repo-check"),
    "--dangerously-bypass-approvals-and-sandbox",
)


def items(done: Done, kind: str) -> list[dict[str, Any]]:
    """The completed items of a kind."""
    completed = [event["item"] for event in done.events if event["type"] == "item.completed"]
    return [item for item in completed if item["type"] == kind]


def said(done: Done) -> str:
    """The last message."""
    found = items(done, "agent_message")
    assert found, done.told
    return str(found[-1]["text"])


@works("chat")
def chat(server: Server) -> None:
    assert SENTENCE.match(said(agent.run(server, TALK)))


@works("tools")
def tools(server: Server) -> None:
    """A function, and, as for models that Codex knows, a program that calls it."""
    for model in ("scripted", "gpt-6-astra"):
        done = agent.run(server, WEATHER, model=model)
        [command] = items(done, "command_execution")
        assert command["aggregated_output"] == "3 degrees\n", done.told
        assert said(done) == REPORT


@works("custom tools")
def custom_tools(server: Server) -> None:
    done = agent.run(server, "Write a note.", model="gpt-5.5")
    assert (done.folder / "note.txt").read_text() == "Oslo\n", done.told
    assert said(done) == "Done with it."


@works("namespaces")
def namespaces(server: Server) -> None:
    """A tool of an MCP server; and one of Codex's, which does not know the agent it is asked for."""
    flags = (
        *("-c", f"mcp_servers.weather.command={json.dumps(sys.executable)}"),
        *("-c", f"mcp_servers.weather.args={json.dumps([str(SERVER)])}"),
    )
    done = agent.run(server, "Look outside.", *flags)
    [call] = items(done, "mcp_tool_call")
    assert (call["server"], call["tool"]) == ("weather", "look_outside")
    assert "3 degrees in Oslo" in json.dumps(call["result"])
    assert said(done) == REPORT
    done = agent.run(server, "Close the agent.")
    assert "invalid agent id nobody" in done.errors, done.told
    assert said(done) == "Done with it."


@works("JSON schemas")
def json_schemas(server: Server) -> None:
    schema = Path.home() / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    done = agent.run(server, JSON_ASKED, "--output-schema", str(schema))
    assert json.loads(said(done)) == ADA


@works("errors")
def errors(server: Server) -> None:
    done = agent.run(server, TALK, key="wrong")
    assert KEY_REFUSED in done.output, done.told
    long = agent.run(server, "é " * 30_000)  # a token for each byte
    assert "ran out of room in the model's context window" in long.output, long.told


@works("usage")
def usage(server: Server) -> None:
    done = agent.run(server, WEATHER)
    [end] = [event for event in done.events if event["type"] == "turn.completed"]
    assert end["usage"]["output_tokens"] == 7, end  # a call, and an answer
    assert end["usage"]["cached_input_tokens"] > 10_000, end  # what the call's request had


@works("Responses")
def goes_on(server: Server) -> None:
    agent.run(server, TALK)
    assert said(agent.run(server, WEATHER, "resume", "--last")) == REPORT


@works("cancelling")
def cancelling(server: Server) -> None:
    agent.cancel(server)
