"""How messages are prepared, and their tokens counted."""

from __future__ import annotations

from surestep_gateway.request.prompts import PreparedRequest, dump_prepared, load_prepared
from surestep_gateway.text.job import Job, dump_bytes, load_bytes

from .request import draft_count, draft_message

MESSAGE: Job[PreparedRequest] = Job(b"message", draft_message, dump_prepared, load_prepared)
COUNT: Job[bytes] = Job(b"count", draft_count, dump_bytes, load_bytes)
