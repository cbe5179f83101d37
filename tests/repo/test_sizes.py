"""Files and functions can be read in one sitting, and files are worth opening.

A waiver is a line below, visible in review.
"""

from __future__ import annotations

import ast
import statistics
from collections import defaultdict
from pathlib import Path

from repo.source import product, sources

_MAX_FILE = 400
_MAX_FUNCTION = 60
_FILE_WAIVERS: dict[str, int] = {}  # path -> lines it may have
_FUNCTION_WAIVERS: dict[str, int] = {}  # path::function -> lines it may have

_LEAST_MEDIAN = 120  # lines of a folder's modules where there are four or more
_MEDIAN_WAIVERS = {
    "cli/surestep_cli/api": 86,
    "cli/surestep_cli/bench": 105,
    "client/surestep/client": 110,
    "common/surestep_common": 104,
    "gateway/surestep_gateway/apis/embeddings": 118,
    "kernels/surestep_kernels": 66,
    "kernels/surestep_kernels/columns/cpu": 79,
    "scheduler_svc/surestep_scheduler/vllm": 105,
    "worker_svc/surestep_worker/drafters": 56,
    "worker_svc/surestep_worker/host": 56,
}  # folder -> lines its median has: joining raises it, splitting does not lower it


def test_files_are_short() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources()}
    over = {n: c for n, c in lengths.items() if c > _FILE_WAIVERS.get(n, _MAX_FILE)}
    assert over == {}


def test_functions_are_short() -> None:
    over = {
        name: lines
        for name, lines in _functions().items()
        if lines > _FUNCTION_WAIVERS.get(name, _MAX_FUNCTION)
    }
    assert over == {}


def test_folders_hold_subjects_and_no_scraps() -> None:
    """A new module goes where it would not bring down the median: into a neighbour that could have it."""
    low = {
        folder: median
        for folder, median in _medians().items()
        if median < _MEDIAN_WAIVERS.get(folder, _LEAST_MEDIAN)
    }
    assert low == {}


def test_waivers_are_needed() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in sources()}
    functions = _functions()
    stale = [n for n in _FILE_WAIVERS if lengths.get(n, 0) <= _MAX_FILE]
    stale += [n for n in _FUNCTION_WAIVERS if functions.get(n, 0) <= _MAX_FUNCTION]
    medians = _medians()
    stale += [n for n in _MEDIAN_WAIVERS if medians.get(n, _LEAST_MEDIAN) >= _LEAST_MEDIAN]
    assert stale == []


def _medians() -> dict[str, float]:
    """Lines of a folder's modules, by folder. What the folder of an op holds is for test_ops.py."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for source in product():
        path = Path(source.name)
        if path.name != "__init__.py" and path.parts[1:3] != ("surestep_kernels", path.parent.name):
            lengths[str(path.parent)].append(len(source.text.splitlines()))
    return {folder: statistics.median(n) for folder, n in lengths.items() if len(n) >= 4}


def _functions() -> dict[str, int]:
    """Lines of bodies by name; of functions of one name in a file, as methods are, the longest.

    Signatures do not count: those of kernels have a line for each of many arguments.
    """
    lengths: dict[str, int] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{source.name}::{node.name}"
                length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
                lengths[name] = max(length, lengths.get(name, 0))
    return lengths
