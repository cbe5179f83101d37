"""Requests that coding agents sent to a server of ours: recorded, with long texts cut.

`scripts/clients` runs the agents themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from surestep_gateway.apis.responses.tools import LEFT_OUT

_FOLDER = Path(__file__).parents[2] / "data" / "agents"


class Recorded(NamedTuple):
    """One request; its client and version are for the reader of a failure."""

    name: str
    client: str
    version: str
    path: str
    body: dict[str, Any]

    @property
    def model(self) -> str:
        """The model that the client asked for."""
        return str(self.body["model"])

    def tools(self) -> list[str]:
        """The names of all functions and custom tools, by which the model knows them."""
        listed = [*self.body.get("tools", ())]
        for item in self.body.get("input", ()):
            listed += item.get("tools", ())
        return [name for tool in listed for name in _names(tool)]


def recorded() -> tuple[Recorded, ...]:
    """All of them, by name."""
    return tuple(
        Recorded(path.stem, **json.loads(path.read_text()))
        for path in sorted(_FOLDER.glob("*.json"))
    )


def _names(tool: dict[str, Any]) -> list[str]:
    if tool.get("type") == "namespace":
        space = "" if tool["name"] == "functions" else f"{tool['name']}__"
        return [space + one["name"] for one in tool["tools"]]
    if tool.get("type") in LEFT_OUT:
        return []
    function = tool.get("function", tool)
    return [function.get("name", tool.get("type"))]
