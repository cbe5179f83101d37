"""Stores that are closed behind a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from surestep_worker.tiers.entry import EntryForm
from surestep_worker.tiers.store import StoreTier


@pytest.fixture
def opened() -> Iterator[Callable[[str, int, EntryForm], StoreTier]]:
    with contextlib.ExitStack() as stack:

        def store(url: str, most_bytes: int, form: EntryForm) -> StoreTier:
            return stack.enter_context(contextlib.closing(StoreTier(url, most_bytes, form)))

        yield store
