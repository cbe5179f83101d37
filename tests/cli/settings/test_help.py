"""Defaults as help and docs/flags.md show them: what one would type."""

from __future__ import annotations

import pytest
from pydantic import Field
from pydantic.fields import FieldInfo
from surestep_cli.main import Serve
from surestep_cli.settings.help import declared, typed_default
from surestep_cli.settings.serve_settings import ServeSettings
from surestep_common.config import Settings

_TYPED = {
    name: shown
    for name, field in Serve.model_fields.items()
    if (shown := typed_default(field)) is not None
}


@pytest.mark.parametrize("name", _TYPED)
def test_a_default_that_is_typed_is_the_default(name: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    typed = ServeSettings.of_flags([flag, _TYPED[name]])
    assert getattr(typed, name) == getattr(ServeSettings.of_flags([]), name)


class _Example(Settings):
    one: int = 1
    ratio: float = 1.0
    nothing: int = 0
    size: int = 3 << 29
    odd: int = (1 << 20) + 1
    small: int = 2048
    off: bool = False
    made: list[str] = Field(default_factory=list)
    names: tuple[str, ...] = ("a", "b")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("one", "1"),
        ("ratio", "1"),
        ("nothing", "0"),
        ("size", "1536M"),
        ("odd", "1048577"),
        ("small", "2048"),
        ("off", None),
        ("made", None),
        ("names", "a,b"),
    ],
)
def test_defaults_are_shown_as_they_are_typed(name: str, shown: str | None) -> None:
    assert typed_default(_Example.model_fields[name]) == shown


def test_help_has_defaults_that_equal_true_or_false() -> None:
    fields: dict[str, FieldInfo] = Serve.model_fields
    assert declared("pipeline_depth", fields["pipeline_depth"])[1].endswith("(default: 1)")
    assert declared("shutdown_delay_s", fields["shutdown_delay_s"])[1].endswith("(default: 0)")
    assert declared("standby", fields["standby"])[1].endswith("(default: on)")
    assert "default" not in declared("log_json", fields["log_json"])[1]


@pytest.mark.parametrize(("typed", "size"), [("64K", 65536), ("1k", 1000), (7, 7)])
def test_bytes_are_written_as_people_write_them(typed: str | int, size: int) -> None:
    assert ServeSettings.of_flags(["--max-body-bytes", str(typed)]).max_body_bytes == size


@pytest.mark.parametrize("typed", ["0", "-1K", "1.5"])
def test_what_is_no_number_of_bytes_is_refused(typed: str) -> None:
    with pytest.raises(ValueError, match="max_total_body_bytes"):
        ServeSettings.of_flags([f"--max-total-body-bytes={typed}"])
