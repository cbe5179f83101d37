"""The support of each flag of vLLM's `serve`, from data/vllm_flags.toml, which explains itself."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from typing import Any, Self

_ENTRY = re.compile(
    r"(?P<name>[\w.-]+)(?P<shorts>(?:, -[\w-]+)*)(?: (?P<kind>[A-Z\[]\S*))?"
    r"(?: = (?P<neutral>\S+))?(?: ~ (?P<idle>\S+))?(?: -> (?P<target>\S+))?"
)


class FlagSupport(StrEnum):
    """Kind of support for a flag."""

    SAME = "same"
    RENAMED = "renamed"
    NO_EFFECT = "no effect"
    NOT_YET = "not yet"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """Flag of vLLM. Names have dashes and no leading ones, short forms have them."""

    name: str
    shorts: tuple[str, ...]
    kind: str  # as written in the table; empty for a switch
    neutral: frozenset[str]  # values that ask for nothing
    idle: frozenset[str]  # values that have no effect, whatever becomes of others
    verdict: FlagSupport
    why: str  # what it does nothing for; empty where every value is acted on
    target: str  # the setting, for a mapping with `.key`; empty where there is none

    @classmethod
    def parse(cls, entry: str, verdict: FlagSupport, why: str) -> Self:
        """Parse an entry of the table."""
        match = _ENTRY.fullmatch(entry)
        assert match is not None, entry
        name = match["name"]
        return cls(
            name=name,
            shorts=tuple(match["shorts"].replace(",", "").split()),
            kind=match["kind"] or "",
            neutral=_values(match["neutral"]),
            idle=_values(match["idle"]),
            verdict=verdict,
            why=why,
            target=match["target"] or (name if verdict is FlagSupport.SAME else ""),
        )

    @property
    def acted_on(self) -> bool:
        """Return whether a setting takes its value."""
        return bool(self.target)

    def is_idle(self, value: Any) -> bool:
        """Return whether this value has no effect."""
        return str(value).strip().lower() in self.idle

    def is_neutral(self, value: Any) -> bool:
        """Return whether this value asks for the only behaviour there is."""
        if isinstance(value, bool):
            return ("on" if value else "off") in self.neutral
        text = str(value).strip().lower()
        return text in self.neutral or any(_same_number(text, other) for other in self.neutral)


def _values(text: str | None) -> frozenset[str]:
    return frozenset(text.split("|") if text else ())


def _same_number(text: str, other: str) -> bool:
    try:
        return float(text) == float(other)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class VllmFlags:
    release: str  # of vLLM, the newest whose flags it holds
    environment: Mapping[str, VllmFlag]  # by variable
    by_name: Mapping[str, VllmFlag]
    by_short: Mapping[str, VllmFlag]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """Parse the table."""
        flags = [
            VllmFlag.parse(entry, FlagSupport(group["verdict"]), group.get("why", ""))
            for group in table["group"]
            for entry in group["flags"]
        ]
        return cls(
            release=table["release"],
            environment={
                name: VllmFlag.parse(entry, FlagSupport.SAME, "")
                for name, entry in table["environment"].items()
            },
            by_name=_unique((flag.name, flag) for flag in flags),
            by_short=_unique((short, flag) for flag in flags for short in flag.shorts),
        )


def _unique(pairs: Iterable[tuple[str, VllmFlag]]) -> dict[str, VllmFlag]:
    found: dict[str, VllmFlag] = {}
    for name, flag in pairs:
        assert name not in found, f"{name} is there twice"
        found[name] = flag
    return found


@functools.cache
def vllm_flags() -> VllmFlags:
    """Return the table, read once."""
    path = files(__package__) / "data" / "vllm_flags.toml"
    return VllmFlags.of(tomllib.loads(path.read_text(encoding="utf-8")))
