"""Every example is valid for every Kubernetes from 1.25 to 1.37, unknown fields included."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.processes.helm_chart import EXAMPLES, needs_helm, render

pytestmark = needs_helm

# Kinds of others, which Kubernetes has no schema of.
_FOREIGN = {"LeaderWorkerSet", "ScaledObject", "ServiceMonitor", "PodMonitor", "HTTPRoute"}


@pytest.mark.parametrize("version", [f"1.{minor}" for minor in range(25, 38)])
@pytest.mark.rotates(3)
def test_examples_are_valid(version: str) -> None:
    for example in EXAMPLES:
        _check(yaml.safe_load(example.read_text()), example, version)


def _check(values: dict[str, object], example: Path, version: str) -> None:
    checked = 0
    for manifest in render(values, version=f"{version}.0").all:
        if manifest["kind"] not in _FOREIGN:
            where = f"{example.name}: {manifest['kind']} {manifest['metadata']['name']}"
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise AssertionError(f"{where}: {error}") from error
            checked += 1
    assert checked > 10
