"""docs/clients.md: the table of clients and features below what people wrote."""

from __future__ import annotations

from collections.abc import Mapping

from clients.checks import FAILED
from clients.environments import HERE, Client, clients

PAGE = HERE.parents[1] / "docs" / "clients.md"
HEADING = "\n## Clients and features\n"
FEATURES = (
    *("chat", "text", "streaming", "tools", "forced tools", "custom tools", "namespaces"),
    *(
        "JSON schemas",
        "errors",
        "usage",
        "Responses",
        "seeds, logprobs",
        "embeddings",
        "cancelling",
        "scoring",
        "load",
    ),
)


def row(client: Client, missing: str | None = None, troubles: Mapping[str, str] = {}) -> str:
    """A client's line of the table; `missing` says why it was not run."""
    outcomes = client.claims | dict.fromkeys(troubles, FAILED)
    assert set(outcomes) <= set(FEATURES), f"{client.script.name}: no such columns"
    cells = [outcomes.get(feature, "") for feature in FEATURES]
    if missing is not None:
        cells = [f"could not be installed: {missing}".replace("|", "/"), *[""] * (len(cells) - 1)]
    return f"| {client.title} | {client.version} | {' | '.join(cells)} |"


def write(missing: Mapping[str, str]) -> None:
    """After a run of all clients in which nothing failed."""
    rows = [row(client, missing.get(client.name)) for client in clients()]
    PAGE.write_text(_above() + _table(rows))


def check() -> int:
    """Exit status: 1 if a line is not what the scripts say, unless it says that it was not run."""
    found = PAGE.read_text().removeprefix(_above()).splitlines()[-len(clients()) :]
    rows = [
        old
        if old.startswith(f"| {client.title} | {client.version} | could not be")
        else row(client)
        for client, old in zip(clients(), found, strict=False)
    ]
    if _above() + _table(rows) == PAGE.read_text():
        return 0
    print("docs/clients.md is out of date: run scripts/clients")
    return 1


def _above() -> str:
    return PAGE.read_text().split(HEADING)[0].rstrip("\n") + "\n"


def _table(rows: list[str]) -> str:
    lines = [
        HEADING,
        "What the scripts assert; `scripts/clients` runs them and writes this table.\n",
        f"| | version | {' | '.join(FEATURES)} |",
        f"|---|---|{'---|' * len(FEATURES)}",
        *rows,
    ]
    return "\n".join(lines) + "\n"
