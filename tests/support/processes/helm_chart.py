"""The Helm chart as rendered by helm."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[3] / "charts" / "surestep"
EXAMPLES = tuple(sorted((CHART / "examples").glob("*.yaml")))
HELM = shutil.which("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed")

Manifest = dict[str, Any]


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with values on stdin."""
    assert HELM is not None
    given = ("--values", "-") if values is not None else ()
    return subprocess.run(
        (HELM, *arguments, *given),
        input=json.dumps(values) if values is not None else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Rendered:
    """Manifests of one release, named `r`."""

    def __init__(self, text: str) -> None:
        self.all: list[Manifest] = [m for m in yaml.safe_load_all(text) if m]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.all if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = [m for m in self.of_kind(kind) if m["metadata"]["name"] == name]
        return found

    def names(self, kind: str) -> list[str]:
        return [manifest["metadata"]["name"] for manifest in self.of_kind(kind)]

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Name of the owner and spec of every pod."""
        for manifest in self.all:
            spec = manifest.get("spec", {})
            if manifest["kind"] == "LeaderWorkerSet":
                spec = {"template": spec["leaderWorkerTemplate"]["workerTemplate"]}
            if manifest["kind"] == "Pod":
                yield manifest["metadata"]["name"], spec
            elif isinstance(spec, dict) and "template" in spec:
                yield manifest["metadata"]["name"], spec["template"]["spec"]

    def pod(self, owner: str) -> Manifest:
        return dict(self.pods())[owner]


@functools.cache
def _template(version: str, values: str) -> str:
    done = helm("template", "r", str(CHART), "--kube-version", version, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(values: dict[str, Any] | None = None, version: str = "1.30") -> Rendered:
    """The chart with these values, for a cluster of this version."""
    return Rendered(_template(version, json.dumps(values or {})))


def refusal(values: dict[str, Any], version: str = "1.30") -> str:
    """What helm says of values that it does not take."""
    done = helm("template", "r", str(CHART), "--kube-version", version, values=values)
    assert done.returncode != 0, "taken"
    return done.stderr


def environ(container: Manifest) -> dict[str, str]:
    """Variables of a container that have a value there."""
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}
