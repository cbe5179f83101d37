"""gRPC prepares for no forks in any process of ours: it reads that when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import importlib, importlib.abc, os, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize(
    "module",
    [
        "surestep_cli.main",
        "surestep_common.watchdog",
        "surestep_gateway.__main__",
        "surestep_scheduler.__main__",
        "surestep_worker.__main__",
        "surestep_worker.process.rank",
    ],
)
@pytest.mark.rotates(1)
def test_it_is_told_before_it_is_imported(module: str) -> None:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    run = [sys.executable, "-c", CODE, module]
    told = subprocess.run(run, env=environ, check=True, capture_output=True, text=True, timeout=60)
    assert told.stdout.split() in (["0"], [])  # once, or never
