"""`python -m surestep_worker`: the supervisor of one rank."""

from __future__ import annotations

import gc
import sys

from surestep_worker.process.child import start_early


def main() -> int:
    """Entry point. Return an exit status."""
    started = start_early(sys.argv)
    gc.disable()  # there is nothing to collect among imports
    from surestep_worker.process.supervise import main as supervise

    gc.enable()
    return supervise(started)


if __name__ == "__main__":
    sys.exit(main())
