"""Build what pyproject.toml cannot say: tags of wheels with C kernels, the README of indexes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import setuptools
from setuptools.command.bdist_wheel import bdist_wheel

ROOT = Path(__file__).parent
LIBRARIES = ROOT / "kernels" / "surestep_kernels" / "columns" / "cpu" / "prebuilt"
MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine of ELF
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")  # a relative one, or an image


class Distribution(setuptools.Distribution):
    """A project that is platform-specific if it has libraries."""

    def has_ext_modules(self) -> bool:
        return any(LIBRARIES.glob("*.so"))


class Wheel(bdist_wheel):
    """Wheel for any Python, and for the machine and the glibc that its libraries need."""

    def get_tag(self) -> tuple[str, str, str]:
        libraries = [file.read_bytes() for file in LIBRARIES.glob("*.so")]
        return "py3", "none", platform_tag(libraries) if libraries else "any"


def platform_tag(libraries: list[bytes]) -> str:
    """Return the tag of the oldest glibc that has every symbol version of the libraries."""
    versions = {int(x) for code in libraries for x in re.findall(rb"\0GLIBC_2\.(\d+)", code)}
    (machine,) = {int.from_bytes(code[18:20], "little") for code in libraries}
    return f"manylinux_2_{max(versions)}_{MACHINES[machine]}"


def readme(text: str, source: str | None) -> str:
    """Return a README whose relative links lead into `source`; without it they are plain text."""

    def link(match: re.Match[str]) -> str:
        image, title, target = match.groups()
        if source is None:
            return "" if image else title
        view = "raw" if image else "blob"
        return f"{image}[{title}]({source.rstrip('/')}/{view}/main/{target})"

    return _LINK.sub(link, text)


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    setuptools.setup(
        distclass=Distribution,
        cmdclass={"bdist_wheel": Wheel},
        long_description=readme(
            (ROOT / "README.md").read_text(), project.get("urls", {}).get("Source")
        ),
        long_description_content_type="text/markdown",
    )
