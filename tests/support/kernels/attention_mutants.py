"""Paged attention in Triton with a bug: a copy of its modules in which one piece reads otherwise.

A copy, because a kernel that has been compiled does not notice when a function that it calls is
exchanged.
"""

from __future__ import annotations

from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from surestep_kernels.paged_attention import grid as attention_grid

_MODULES = "reference", "grid", "tile", "work", "triton"
_numbers = count()


class Mutant(NamedTuple):
    """A piece of one of the modules, and what stands there instead."""

    module: str
    right: str
    wrong: str

    def load(self, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
        """Return the mutated copy of paged_attention/triton.py, written below `folder`."""
        package = folder / f"mutated_attention_{next(_numbers)}"
        package.mkdir()
        (package / "__init__.py").touch()
        of = Path(attention_grid.__file__).parent
        for name in _MODULES:
            source = (of / f"{name}.py").read_text()
            if name == self.module:
                assert source.count(self.right) == 1, self.right
                source = source.replace(self.right, self.wrong)
            (package / f"{name}.py").write_text(source)
        patch.syspath_prepend(folder)
        return import_module(f"{package.name}.triton")


_SINK = "tl.exp2(tl.load(sinks_ptr + {head}) * LOG2_E - m)"
# Sinks that are among the splits as well as behind them.
SINK_MUTANTS = {
    "counted twice where splits are merged": Mutant(
        "triton",
        "    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)\n    to = ((row.begin",
        f"    total += {_SINK.format(head='head')}\n"
        "    out = finish(m, total, acc, head, sinks_ptr, scales_ptr, C)\n    to = ((row.begin",
    ),
    "counted in every split of a tile": Mutant(
        "triton",
        "        m, total, acc = merge(m, total, acc, part_m, part_total, part)\n    head =",
        "        heads = inputs.kv_head * C.GROUP + member % C.GROUP\n"
        f"        part_total += {_SINK.format(head='heads').replace('- m', '- part_m')}\n"
        "        m, total, acc = merge(m, total, acc, part_m, part_total, part)\n    head =",
    ),
    "of the heads of another group": Mutant(
        "tile", "tl.load(sinks_ptr + head)", "tl.load(sinks_ptr + head % C.GROUP)"
    ),
}
WINDOW_MUTANTS = {
    "a position more": Mutant("tile", "> last[:, None] - C.WINDOW", ">= last[:, None] - C.WINDOW"),
    "a position less": Mutant(
        "tile", "> last[:, None] - C.WINDOW", "> last[:, None] - C.WINDOW + 1"
    ),
    "begun too late": Mutant("tile", "first + 1 - C.WINDOW", "first + 2 - C.WINDOW"),
    "begun for the last token of a tile": Mutant(
        "tile", "first + 1 - C.WINDOW", "first + tokens - C.WINDOW"
    ),
}
