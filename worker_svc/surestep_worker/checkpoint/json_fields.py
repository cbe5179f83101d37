"""Values of JSON from untrusted files: type and bounds of every one are checked.

No size is used in a product, a table or an allocation before it has been checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from surestep_common.errors import InvalidRequest

_SHOWN = 60  # characters of a wrong value


class Fields:
    """The values of a JSON object; null is the same as missing."""

    def __init__(self, values: Mapping[str, Any], file: str = "config.json") -> None:
        self._values = values
        self._file = file

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __len__(self) -> int:
        return len(self._values)

    def size(
        self,
        key: str,
        most: int,
        *,
        least: int = 1,
        multiple: int = 1,
        default: int | None = None,
    ) -> int:
        """Return a whole number within bounds. Raises InvalidRequest, as do all these methods."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self._refuse(key, "a whole number")
        if not least <= value <= most:
            self._refuse(key, f"from {least} to {most}")
        if value % multiple:
            self._refuse(key, f"a multiple of {multiple}")
        return value

    def number(
        self,
        key: str,
        most: float,
        *,
        above: float = 0.0,
        least: float | None = None,
        default: float | None = None,
    ) -> float:
        """Return a finite number, at most `most`, and greater than `above` or at least `least`."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._refuse(key, "a number")
        if least is not None and not least <= value <= most:  # rejects NaN, too
            self._refuse(key, f"from {least:g} to {most:g}")
        if least is None and not above < value <= most:
            self._refuse(key, f"more than {above:g} and at most {most:g}")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        """Return true or false."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._given(key, default)
        if not isinstance(value, str):
            self._refuse(key, "a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if missing."""
        values = self._given(key, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            self._refuse(key, "a list of strings")
        return tuple(values)

    def sizes(self, key: str, most: int) -> tuple[int, ...]:
        """Return a whole number from 0, or a list of them; empty if missing."""
        given = self._given(key, [])
        values = given if isinstance(given, list) else [given]
        if not all(type(value) is int and 0 <= value <= most for value in values):
            self._refuse(key, f"whole numbers from 0 to {most}")
        return tuple(values)

    def numbers(self, key: str, most: float) -> tuple[float, ...]:
        """Return a list of numbers above 0; empty if missing."""
        values = self._given(key, [])
        if not isinstance(values, list) or not all(
            type(value) in (int, float) and 0 < value <= most for value in values
        ):
            self._refuse(key, f"a list of numbers above 0, up to {most:g}")
        return tuple(map(float, values))

    def object(self, key: str) -> Fields:
        """Return an object inside this one; empty if missing."""
        value = self._given(key, {})
        if not isinstance(value, dict):
            self._refuse(key, "an object")
        return Fields(value, f"{self._file}: {key}")

    def value(self, key: str) -> Any:
        """Return what the file says, whatever its type; None if missing."""
        return self._values.get(key)

    def objects(self, key: str) -> dict[str, Fields]:
        """Return the objects inside an object by name, in the order of the file; empty if
        missing."""
        inner = self.object(key)
        return {name: inner.object(name) for name in inner._values}

    def or_else(self, usual: Mapping[str, Any] | Fields) -> Fields:
        """Return these fields, and of the usual ones those that the file does not name: what it
        calls null stays null."""
        values = usual._values if isinstance(usual, Fields) else usual
        return Fields({**values, **self._values}, self._file)

    def without(self, key: str) -> Fields:
        """Return all fields but one."""
        return Fields({k: v for k, v in self._values.items() if k != key}, self._file)

    def _given(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise InvalidRequest(f"{self._file} lacks {key}", param="model")
        return value

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        shown = repr(self._values.get(key))
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        raise InvalidRequest(f"{self._file}: {key} is {shown} and must be {wanted}", param="model")
