"""opencode (opencode-ai), over chats"""

from __future__ import annotations

from typing import Any

from clients.agents.agent import KEY_REFUSED, Agent, Done
from clients.checks import REPORT, SENTENCE, TALK, WEATHER, Server, works

agent = Agent("opencode", "opencode.json", "--format", "json")


def parts(done: Done, kind: str) -> list[dict[str, Any]]:
    """The parts of the answer of a kind."""
    found = [event["part"] for event in done.events if event["type"] == kind]
    assert found, done.told
    return found


@works("chat")
def chat(server: Server) -> None:
    assert SENTENCE.match(parts(agent.run(server, TALK), "text")[-1]["text"])


@works("tools")
def tools(server: Server) -> None:
    done = agent.run(server, WEATHER)
    [call] = parts(done, "tool_use")
    assert call["state"]["output"] == "3 degrees\n"
    assert parts(done, "text")[-1]["text"] == REPORT


@works("errors")
def errors(server: Server) -> None:
    done = agent.run(server, TALK, key="wrong")
    assert KEY_REFUSED in done.output, done.told


@works("usage")
def usage(server: Server) -> None:
    counts = parts(agent.run(server, TALK), "step_finish")[-1]["tokens"]
    assert counts["output"] == 8
    assert counts["input"] + counts["cache"]["read"] > 5_000


@works("cancelling")
def cancelling(server: Server) -> None:
    agent.cancel(server)
