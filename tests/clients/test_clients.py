"""The clients with the smallest packages, as `scripts/clients` runs all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import page, run
from clients.environments import CannotInstallError, Client, clients, environment

SMALLEST = ("openai", "openai_node", "ai_sdk", "instructor", "pydantic_ai")

pytestmark = pytest.mark.timeout(600)  # packages are fetched the first time


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[run.Served]:
    with run.server(tmp_path_factory.mktemp("clients")) as served:
        yield served


@pytest.mark.parametrize(
    "client", [one for one in clients() if one.name in SMALLEST], ids=lambda one: one.name
)
@pytest.mark.rotates(3)
def test_what_users_of_a_client_see(client: Client, served: run.Served) -> None:
    try:
        troubles = run.run(client, served)
    except CannotInstallError as error:
        pytest.skip(f"{client.name} cannot be installed: {error}")
    assert not troubles, "\n".join(f"{feature}: {text}" for feature, text in troubles.items())


def test_the_page_says_against_which_models_a_row_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that has changed was not run against the models of before."""
    changed, missing, *others = [page.row(client) for client in clients()]
    before = page.PAGE.read_text(encoding="utf-8")
    copy = tmp_path / "clients.md"
    copy.write_text(before.replace(changed, changed.replace("works", "refused")))
    monkeypatch.setattr(page, "PAGE", copy)
    assert page.check() == 1
    page.write("another", {clients()[1].name: "no | network"})
    assert page.check() == 0
    ran = page._ran()
    assert ran[changed] == {"another"}
    assert missing not in ran
    assert {"another", "llama"} <= set.intersection(*(ran[row] for row in others))


def test_without_a_package_index_the_reason_is_told_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    versions = tmp_path / "versions.txt"
    versions.write_text("no-such-package-of-a-client==1.0\n")
    client = clients()[0]._replace(script=Path("with_nobody.py"), versions=versions)
    with pytest.raises(CannotInstallError, match="no-such-package-of-a-client"):
        environment(client, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
