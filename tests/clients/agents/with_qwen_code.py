"""Qwen Code (@qwen-code/qwen-code), over chats"""

from __future__ import annotations

import json

from clients.agents.agent import ADA, JSON_ASKED, KEY_REFUSED, SCHEMA, Agent, result
from clients.checks import REPORT, TALK, WEATHER, Server, works

agent = Agent("Qwen Code", None, "--yolo")
EVENTS = ("--output-format", "stream-json", "--include-partial-messages")


@works("chat")
def chat(server: Server) -> None:
    agent.chat(server)


@works("streaming")
def streaming(server: Server) -> None:
    agent.stream(server, *EVENTS)


@works("tools")
def tools(server: Server) -> None:
    done = agent.run(server, WEATHER)
    assert done.output.strip() == REPORT, done.told


@works("JSON schemas")
def json_schemas(server: Server) -> None:
    flags = ("--output-format", "json", "--json-schema", json.dumps(SCHEMA))
    done = agent.run(server, JSON_ASKED, *flags)
    assert json.loads(result(done)["result"]) == ADA, done.told


@works("errors")
def errors(server: Server) -> None:
    done = agent.run(server, TALK, key="wrong")
    assert KEY_REFUSED in done.told
    done = agent.run(server, TALK, model="nonesuch")
    assert "'nonesuch' does not exist" in done.told


@works("usage")
def usage(server: Server) -> None:
    counts = result(agent.run(server, TALK, *EVENTS))["usage"]
    assert counts["output_tokens"] == 16, counts  # it asks itself what to recall, first


@works("cancelling")
def cancelling(server: Server) -> None:
    agent.cancel(server)
