"""Commands of vLLM and ollama that do not exist here, their equivalents, and commands mistyped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .flags import nearest

_LISTS = "`surestep --help` lists the commands"
_LISTED = "`hf cache ls` lists models of the hub, `surestep status` what runs"
_COMMANDS = {
    "complete": "any OpenAI client calls a server, `surestep chat` talks with one",
    "launch": "`surestep serve` starts all parts of a server",
    "run-batch": "send the requests to a server",
    "run": "`surestep serve MODEL` starts a server, `surestep chat` talks with it",
    "pull": "`surestep fetch MODEL` fetches a model, and so does `surestep serve MODEL`",
    "list": _LISTED,
    "ls": _LISTED,
    "ps": "`surestep status` lists what runs",
    "show": "`curl URL/v1/models` describes the model that is served",
    "stop": "Ctrl-C, or SIGTERM to `surestep serve`, stops a server",
    "rm": "`hf cache rm` removes models of the hub",
    "create": "`surestep serve FOLDER` takes a folder or a GGUF file as it is",
}
_BENCHES = ("serve", "latency", "throughput", "startup", "sweep")


def hint_for(arguments: Sequence[str], known: Collection[str]) -> str | None:
    """Return a hint for a command that is none of those known; None for others."""
    match arguments:
        case [command, *_] if command in _COMMANDS:
            return f"there is no command {command}: {_COMMANDS[command]}"
        case ["bench", kind, *_] if kind in _BENCHES:
            return (
                f"there is no bench {kind}: `surestep bench` measures a running server, and so "
                "does `vllm bench serve`"
            )
        case [command, *_] if command not in known and not command.startswith("-"):
            near = nearest(command, [*known, *_COMMANDS])
            meant = f"did you mean {near}?" if near in known else _COMMANDS.get(near or "", _LISTS)
            return f"there is no command {command}: {meant}"
    return None
