"""An MCP server over standard input and output, with one tool that says how warm it is somewhere."""

from __future__ import annotations

import json
import sys
from typing import Any

_TOOL = {
    "name": "look_outside",
    "description": "Reads the thermometer.",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def _result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            about = {"name": "weather", "version": "1"}
            version = params["protocolVersion"]
            return {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": about,
                "instructions": "Tools for weather.",
            }
        case "tools/list":
            return {"tools": [_TOOL]}
        case "tools/call":
            text = f"3 degrees in {params['arguments']['city']}"
            return {"content": [{"type": "text", "text": text}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = _result(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
