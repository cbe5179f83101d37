"""docs/use/clients.md: the table of clients and features below what people wrote."""

from __future__ import annotations

from collections.abc import Mapping

from clients.checks import FAILED
from clients.environments import HERE, Client, clients

PAGE = HERE.parents[1] / "docs" / "use" / "clients.md"
HEADING = "\n## Clients and features\n"
FEATURES = (
    *("chat", "text", "streaming", "tools", "forced tools", "custom tools", "namespaces"),
    *("JSON schemas", "errors", "usage", "Responses", "seeds, logprobs", "embeddings"),
    *("cancelling", "scoring", "load", "training"),
)


_SAID = """\
`scripts/clients` writes this table of what the scripts assert. Empty cells are not tested; the last column names the models.
"""
MODELS = "models"  # the column of the families that a row was run against


def row(client: Client, missing: str | None = None, troubles: Mapping[str, str] = {}) -> str:
    """A client's line of the table; `missing` says why it was not run."""
    outcomes = client.claims | dict.fromkeys(troubles, FAILED)
    assert set(outcomes) <= set(FEATURES), f"{client.script.name}: no such columns"
    cells = [outcomes.get(feature, "") for feature in FEATURES]
    if missing is not None:
        cells = [f"could not be installed: {missing}".replace("|", "/"), *[""] * (len(cells) - 1)]
    return f"| {client.title} | {client.version} | {' | '.join(cells)} |"


def write(family: str, missing: Mapping[str, str]) -> None:
    """After a run of all clients against such a model in which nothing failed.

    Rows that have not changed since keep the models that they were run against before.
    """
    ran = _ran()
    rows = []
    for client in clients():
        line = row(client, missing.get(client.name))
        now = set() if client.name in missing else {family}
        rows.append(line + f" {', '.join(sorted(now | ran.get(line, set())))} |")
    PAGE.write_text(_above() + _table(rows))


def check() -> int:
    """Exit status: 1 if a line is not what the scripts say, unless it says that it was not run."""
    ran = _ran()
    rows = []
    for client in clients():
        absent = f"| {client.title} | {client.version} | could not be"
        line = next((old for old in ran if old.startswith(absent)), row(client))
        rows.append(line + f" {', '.join(sorted(ran.get(line, set())))} |")
    if _above() + _table(rows) == PAGE.read_text():
        return 0
    print("docs/use/clients.md is out of date: run scripts/clients")
    return 1


def _ran() -> dict[str, set[str]]:
    """The page's rows as `row` makes them, and the models that each was run against."""
    _, *rows = PAGE.read_text().split(f"{MODELS} |\n|---")[-1].splitlines()
    parted = (line.removesuffix(" |").rpartition(" | ") for line in rows)
    return {
        f"{line} |": set(filter(None, models.strip().split(", "))) for line, _, models in parted
    }


def _above() -> str:
    return PAGE.read_text().split(HEADING)[0].rstrip("\n") + "\n"


def _table(rows: list[str]) -> str:
    lines = [
        HEADING,
        _SAID,
        f"| | version | {' | '.join(FEATURES)} | {MODELS} |",
        f"|---|---|{'---|' * (len(FEATURES) + 1)}",
        *rows,
    ]
    return "\n".join(lines) + "\n"
