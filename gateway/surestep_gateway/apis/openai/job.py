"""Prepare chats, completions and token counts."""

from __future__ import annotations

from surestep_gateway.request.prepare import draft_chat, draft_completion
from surestep_gateway.request.prepared import PreparedRequest, dump_prepared, load_prepared
from surestep_gateway.text.service import Job, dump_bytes, load_bytes

from .tokenize import draft_detokenize, draft_tokenize

_PREPARED = (dump_prepared, load_prepared)
CHAT: Job[PreparedRequest] = Job(b"chat", draft_chat, *_PREPARED)
COMPLETION: Job[PreparedRequest] = Job(b"completion", draft_completion, *_PREPARED)
TOKENIZE: Job[bytes] = Job(b"tokenize", draft_tokenize, dump_bytes, load_bytes)
DETOKENIZE: Job[bytes] = Job(b"detokenize", draft_detokenize, dump_bytes, load_bytes)
