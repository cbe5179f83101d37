"""`python -m surestep_scheduler`: serve with the settings of the environment."""

from __future__ import annotations

import logging

import uvloop

from .config import SchedulerSettings
from .server import serve


def main() -> None:
    """Run one scheduler until it is told to stop."""
    logging.basicConfig(level=logging.INFO)
    uvloop.run(serve(SchedulerSettings()))


if __name__ == "__main__":
    main()
