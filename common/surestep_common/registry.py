"""A named set of lazily imported implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import InvalidRequest

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name users type to a factory. Factories import what they need when called."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._factories: dict[str, Callable[..., T]] = {}

    def register(self, *names: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorator. Registering a name twice is a bug."""

        def add(factory: Callable[..., T]) -> Callable[..., T]:
            for name in names:
                assert name not in self._factories, f"{self._kind} {name} registered twice"
                self._factories[name] = factory
            return factory

        return add

    def get(self, name: str) -> Callable[..., T]:
        """Return the factory of `name`. Raises InvalidRequest naming the choices."""
        if name not in self._factories:
            raise InvalidRequest(
                f"unknown {self._kind} '{name}'; known: {', '.join(self.names())}", param=self._kind
            )
        return self._factories[name]

    def names(self) -> list[str]:
        """Return the registered names, sorted."""
        return sorted(self._factories)
