"""`python -m surestep_scheduler`: serve with the settings of the environment."""

from __future__ import annotations

import logging
import sys

import uvloop
from surestep_common import access, log
from surestep_common.errors import SurestepError
from surestep_common.process import collect_seldom, dump_stacks_on_signal, raise_file_limit
from surestep_common.watchdog import wait_for_turn

from .config import SchedulerSettings
from .server import serve

logger = logging.getLogger(__name__)


def main() -> int:
    """Run one scheduler until it is told to stop. Exit status: 1 after a fatal error."""
    dump_stacks_on_signal()
    wait_for_turn(sys.argv)
    raise_file_limit()
    settings = SchedulerSettings.load()
    access.use(settings)
    log.configure("scheduler", level=settings.log_level, as_json=settings.log_json)
    collect_seldom()
    status = 0
    try:
        uvloop.run(serve(settings))
    except* SurestepError as fatal:
        logger.error("%s", fatal.exceptions[0])
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
