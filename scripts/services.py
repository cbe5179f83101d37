"""The settings of each service, for the scripts beside it."""

from __future__ import annotations

import sys

from generated import ROOT
from pydantic_settings import BaseSettings

for unit in ("common", "proto", "gateway", "scheduler_svc", "worker_svc", "cli"):
    sys.path.insert(0, str(ROOT / unit))

from surestep_gateway.settings.config import GatewaySettings  # noqa: E402
from surestep_scheduler.config import SchedulerSettings  # noqa: E402
from surestep_worker.config import WorkerSettings  # noqa: E402

SERVICES: dict[str, type[BaseSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
