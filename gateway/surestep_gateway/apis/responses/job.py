"""How requests for responses are prepared."""

from __future__ import annotations

import json
from collections.abc import Sequence

from surestep_gateway.request.prompts import dump_prepared, load_prepared
from surestep_gateway.text.job import Job
from surestep_gateway.text.wire import Parts

from .request import PreparedResponse, draft_continued, draft_response
from .tools import Called


def _dump(prepared: PreparedResponse) -> Parts:
    """Serialise a request of the Responses API."""
    about = {
        "wanted": prepared.wanted,
        "token": prepared.token,
        "asked": prepared.asked,
        "called": prepared.called,
        "num_items": prepared.num_items,
    }
    chat = [] if prepared.chat is None else dump_prepared(prepared.chat)
    return [json.dumps(about, ensure_ascii=False).encode(), prepared.items, *chat]


def _load(parts: Sequence[bytes]) -> PreparedResponse:
    about, items, *chat = parts
    loaded = load_prepared(chat) if chat else None
    fields = json.loads(about)
    fields["called"] = {name: Called(*what) for name, what in fields["called"].items()}
    return PreparedResponse(**fields, items=items, chat=loaded)


RESPONSE: Job[PreparedResponse] = Job(b"response", draft_response, _dump, _load)
CONTINUED: Job[PreparedResponse] = Job(b"continued", draft_continued, _dump, _load)
