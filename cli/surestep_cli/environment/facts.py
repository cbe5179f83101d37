"""Facts for a report of a fault, from this process and from one that loads the kernels."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from surestep_common.config import ENV_PREFIX, child_environ, secret_fields, variables
from surestep_common.releases import package_version

from surestep_cli.settings.sections import SECTIONS
from surestep_cli.settings.serve_settings import ServeSettings

from .machine import cpu_facts, gpus, memory_facts, system_facts

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "llguidance",
    "grpcio",
    "pydantic",
    "starlette",
    "uvicorn",
)
_SECTIONS = ("Speculation", "Memory", "Steps", "Devices", "Recovery")
_SHOWN = {  # settings with values that are neither secrets nor addresses
    "dtype",
    "max_model_len",
    "model_impl",
    "quantization",
    "runner",
    "log_level",
    *(name for section in _SECTIONS for name in SECTIONS[section]),
} - set(secret_fields(ServeSettings))
_INVENTORY = """
import json
from surestep_kernels.columns.cpu.build import inventory
print(json.dumps(inventory()))
"""
_INVENTORY_S = 120.0  # loads torch, perhaps from a slow disk
_ORIGIN = "direct_url.json"  # PEP 610

Facts = Mapping[str, Mapping[str, str] | list[str]]


def collect() -> Facts:
    """Return sections of facts, none of which is a secret."""
    return {
        "surestep": {"version": package_version(), "commit": _commit()},
        "python": {platform.python_implementation(): platform.python_version()},
        "packages": dict(_versions()),
        "system": system_facts(),
        "cpu": cpu_facts(),
        "kernels": _kernels(),
        "memory": memory_facts(),
        "gpus": gpus(),
        "settings": dict(_settings(variables(ENV_PREFIX))),
    }


def show(facts: Facts, *, as_json: bool) -> None:
    """Print the facts: one JSON object, or a section of lines each."""
    if as_json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
        return
    for title, section in facts.items():
        lines = section if isinstance(section, list) else [f"{k}: {v}" for k, v in section.items()]
        sys.stdout.write("".join(f"{line}\n" for line in (title, *_indented(lines or ["none"]))))


def _indented(lines: list[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _commit() -> str:
    """Return the commit of a package that pip took from git, or that is used from its checkout."""
    try:
        origin: dict[str, Any] = json.loads(distribution("surestep").read_text(_ORIGIN) or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    given: str | None = origin.get("vcs_info", {}).get("commit_id")
    return given or _checked_out() or "that of the release"


def _checked_out() -> str | None:
    """Return the commit of the checkout that holds this file; None if git tracks it nowhere."""
    try:
        _git("ls-files", "--error-unmatch", __file__)
        return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    command = ("git", "-C", str(Path(__file__).parent), *words)
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def _kernels() -> dict[str, str]:
    """Return the instructions and the kernels of this CPU. A broken torch is a fact, too."""
    environ = child_environ({"PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        done = subprocess.run(  # noqa: S603 - our own code
            (sys.executable, "-c", _INVENTORY),
            capture_output=True,
            text=True,
            check=True,
            timeout=_INVENTORY_S,
            env=environ,
        )
        found: dict[str, str] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or str(error)).strip().rpartition("\n")[2]
        return {"kernels": f"cannot be loaded: {reason}"}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"kernels": f"cannot be loaded: {error}"}
    return found


def _settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield our variables: values of those that may be shown, the mere names of others."""
    for name, value in sorted(environ.items()):
        known = name.removeprefix(ENV_PREFIX).lower() in _SHOWN
        yield name, value if known else "(set, not shown)"
