"""Import torch without what a rank on CPUs never uses.

A third of the time of `import torch` goes into Python's shape rules and decompositions of operators
(torch._meta_registrations), which serve tensors on the device "meta" and compilers. Nothing of an
eager step asks for them; code that does so later imports them then.
"""

from __future__ import annotations

import sys
from types import ModuleType

_UNUSED = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch, unless it is imported already; without those rules."""
    if "torch" in sys.modules:
        return
    sys.modules[_UNUSED] = ModuleType(_UNUSED)
    try:
        import torch  # noqa: F401
    finally:
        del sys.modules[_UNUSED]
