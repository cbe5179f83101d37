"""Several formats in one checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surestep_common.errors import InvalidRequest

from .format import Format, Quantization, Types

_PATTERN = "re:"


class Target(NamedTuple):
    """Modules that have a format, as far as the files hold them in it."""

    names: tuple[str, ...]  # of modules, patterns behind "re:", or of classes
    format: Format

    def rank(self, module: str) -> int:
        """Return how closely a module is named: 2 by its name or a pattern, 1 by a class."""
        named = any(_matches(module, name) for name in self.names)
        return 2 if named else int(any("." not in name for name in self.names))


def targeted(names: Sequence[str], format_: Format) -> Target:
    """Return a target. Raises InvalidRequest for a pattern that is none."""
    patterns = [name for name in names if name.startswith(_PATTERN)]
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix(_PATTERN))
        except (re.error, RecursionError, OverflowError) as error:
            message = f"config.json names modules by {pattern!r:.60}, which is no pattern: {error}"
            raise InvalidRequest(message, param="model") from None
    return Target(tuple(names), format_)


def _matches(module: str, name: str) -> bool:
    if name.startswith(_PATTERN):
        return re.match(name.removeprefix(_PATTERN), module) is not None
    return module == name


@dataclass(frozen=True, slots=True)
class Mixed(Quantization):
    """Formats of several targets. Of those in which the files can hold a module, the one counts
    that names it most closely, and the first of equals."""

    targets: tuple[Target, ...]

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(target.format for target in self.targets)

    def format_of(self, module: str, types: Types) -> Format | None:
        found = [
            (target.rank(module), held)
            for target in self.targets
            if (held := target.format.format_of(module, types)) is not None
        ]
        return max(found, key=lambda each: each[0])[1] if found else None
