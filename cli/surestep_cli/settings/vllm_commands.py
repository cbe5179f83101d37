"""Commands of vLLM that do not exist here, and their equivalents."""

from __future__ import annotations

from collections.abc import Sequence

_COMMANDS = {
    "complete": "any OpenAI client calls a server, `surestep chat` talks with one",
    "launch": "`surestep serve` starts all parts of a server",
    "run-batch": "send the requests to a server",
    "collect-env": "`surestep status` shows a server's processes",
}
_BENCHES = ("serve", "latency", "throughput", "startup", "sweep")


def hint_for(arguments: Sequence[str]) -> str | None:
    """Return a hint for one of vLLM's commands; None for any other."""
    match arguments:
        case [command, *_] if command in _COMMANDS:
            return f"there is no command {command}: {_COMMANDS[command]}"
        case ["bench", kind, *_] if kind in _BENCHES:
            return (
                f"there is no bench {kind}: `surestep bench` measures a running server, and so "
                "does `vllm bench serve`"
            )
    return None
