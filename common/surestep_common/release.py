"""Release of Surestep."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of the installed distribution, or a stand-in for a source tree."""
    try:
        return version("surestep")
    except PackageNotFoundError:
        return "0+source"
