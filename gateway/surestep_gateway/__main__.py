"""`python -m surestep_gateway`"""

from __future__ import annotations

import logging
import sys

from surestep_common.process import (
    collect_seldom,
    die_with,
    dump_stacks_on_signal,
    end_on_sigterm,
)

logger = logging.getLogger(__name__)


def main() -> int:
    """Return the exit status: 0 after a drain, 1 after a fatal error."""
    end_on_sigterm()
    # A second of imports, during which a signal may already come.
    import uvloop
    from surestep_common import access, log
    from surestep_common.config import or_exit, parent_pid
    from surestep_common.errors import SurestepError

    from surestep_gateway.settings.config import GatewaySettings

    from .server import run

    die_with(parent_pid())
    dump_stacks_on_signal()
    settings = GatewaySettings.load()
    or_exit(GatewaySettings, lambda: settings.each)
    access.use(settings)
    log.configure("gateway", level=settings.log_level, as_json=settings.log_json)
    collect_seldom()
    try:
        uvloop.run(run(settings))
    except SurestepError as error:
        logger.error("%s", error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
