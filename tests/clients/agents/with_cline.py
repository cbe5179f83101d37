"""Cline (cline), over chats and the Responses API"""

from __future__ import annotations

import os
from typing import Any

from clients.agents.agent import KEY_REFUSED, Agent, Done
from clients.checks import REPORT, SENTENCE, TALK, WEATHER, Server, works

os.environ["CLINE_SESSION_BACKEND_MODE"] = "local"  # else it leaves a daemon behind
agent = Agent("Cline")
NATIVE = "openai-native"  # the provider that speaks the Responses API


def events(done: Done, kind: str) -> list[dict[str, Any]]:
    """What the agent says of itself in JSON, of a kind."""
    found = [event["event"] for event in done.events if event["type"] == "agent_event"]
    return [event for event in found if event["type"] == kind]


def result(done: Done) -> dict[str, Any]:
    """The end that it tells of."""
    found = [event for event in done.events if event["type"] == "run_result"]
    assert len(found) == 1, done.told
    return dict(found[0])


@works("chat")
def chat(server: Server) -> None:
    agent.chat(server)


@works("streaming")
def streaming(server: Server) -> None:
    done = agent.run(server, TALK, "--json")
    pieces = [event["text"] for event in events(done, "content_start")]
    assert len(pieces) > 3, done.told
    assert "".join(pieces) == result(done)["text"]


@works("tools")
def tools(server: Server) -> None:
    done = agent.run(server, WEATHER, "--json")
    assert result(done)["text"] == REPORT, done.told
    done = agent.run(server, "Write a note.")
    assert (done.folder / "note.txt").read_text() == "Oslo\n", done.told
    assert done.output.endswith("Done with it.\n"), done.told


@works("errors")
def errors(server: Server) -> None:
    for provider in ("openai-compatible", NATIVE):
        done = agent.run(server, TALK, key="wrong", provider=provider)
        assert KEY_REFUSED in done.told
        done = agent.run(server, TALK, model="nonesuch", provider=provider)
        assert "'nonesuch' does not exist" in done.told
    long = agent.run(server, "é " * 30_000)  # a token for each byte
    assert "exceeds the model's context window" in long.told


@works("usage")
def usage(server: Server) -> None:
    counts = result(agent.run(server, WEATHER, "--json"))["usage"]
    assert counts["outputTokens"] == 7, counts  # a call, and an answer
    assert counts["cacheReadTokens"] > 5_000, counts  # what the call's request had


@works("Responses")
def responses(server: Server) -> None:
    done = agent.run(server, TALK, provider=NATIVE)
    assert SENTENCE.match(done.output), done.told
    done = agent.run(server, WEATHER, "--json", provider=NATIVE)
    assert result(done)["text"] == REPORT, done.told


@works("cancelling")
def cancelling(server: Server) -> None:
    agent.cancel(server)
