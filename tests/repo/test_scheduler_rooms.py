"""The scheduler's folders: small."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

import pytest
from repo.source import PACKAGES, product

_MOST_FILES = 15  # Python files of a folder
_PACKAGES = ("surestep_scheduler",)


@pytest.mark.parametrize("package", _PACKAGES)
def test_folders_hold_few_files(package: str) -> None:
    folders = Counter(PurePath(s.name).parent for s in product() if s.package == package)
    assert folders[PurePath(PACKAGES[package], package)] > 0
    assert {str(f): count for f, count in folders.items() if count > _MOST_FILES} == {}
