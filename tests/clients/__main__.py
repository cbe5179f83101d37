"""`python -m clients MODULE URL KEY FOLDER`: the script of one client, in the client's environment."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from clients import checks

name, root, key, folder = sys.argv[1:]
importlib.import_module(f"clients.{name}")
sys.exit(checks.main(checks.Server(root, key, Path(folder))))
