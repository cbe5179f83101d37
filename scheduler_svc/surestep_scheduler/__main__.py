"""`python -m surestep_scheduler`: serve with the settings of the environment."""

from __future__ import annotations

import uvloop
from surestep_common import access, log
from surestep_common.process import dump_stacks_on_signal, raise_file_limit

from .config import SchedulerSettings
from .server import serve


def main() -> None:
    """Run one scheduler until it is told to stop."""
    dump_stacks_on_signal()
    raise_file_limit()
    settings = SchedulerSettings.load()
    access.use(settings)
    log.configure("scheduler", level=settings.log_level, as_json=settings.log_json)
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
