"""`python -m surestep_gateway.text_process`: prepares large requests for a gateway.

The gateway writes frames to its standard input and reads frames from its standard output. Each
request is bounded: memory by a limit of the system, the time of chat templates by a timer, and the
total time by the gateway, which kills the process. While it checks a grammar, which is native code,
the system ends it at its limit: the gateway has been told which field of the request that is about.
It also ends with the gateway.
"""

from __future__ import annotations

import ctypes
import logging
import resource
import signal
import sys
from typing import Any

from surestep_common import log
from surestep_common.errors import InternalError, RequestTooLarge, SurestepError
from surestep_common.process import die_with_parent
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.text.service import Job, TextProcessor

from .apis.embeddings.job import EMBEDDING, RERANK, SCORE
from .apis.invocations.job import INVOCATION
from .apis.messages.request import COUNT, MESSAGE
from .apis.openai.job import CHAT, COMPLETION, DETOKENIZE, TOKENIZE
from .apis.openai.tokens import GENERATE, RENDER_CHAT, RENDER_COMPLETION
from .apis.responses.request import CONTINUED, RESPONSE
from .generation.schema_check import CHECK
from .request.parse import NAME
from .text import wire
from .text.body_bounds import TOO_MUCH_MEMORY, check_shape
from .text.process_limits import limit_memory
from .text.wire import Parts

logger = logging.getLogger(__name__)

_LARGE_BYTES = 1 << 20  # of a request
_JOBS: tuple[Job[Any], ...] = (
    CHAT,
    COMPLETION,
    TOKENIZE,
    DETOKENIZE,
    GENERATE,
    RENDER_CHAT,
    RENDER_COMPLETION,
    EMBEDDING,
    SCORE,
    RERANK,
    RESPONSE,
    CONTINUED,
    MESSAGE,
    COUNT,
    INVOCATION,
    CHECK,
    NAME,
)
_BY_NAME = {job.name: job for job in _JOBS}


def main() -> int:
    """Serve until the gateway closes the input."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the gateway
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = wire.read(requests)
    if first is None:
        return 0

    def tell(field: str) -> None:
        wire.write(answers, [wire.CHECKING, field.encode()])

    processor = TextProcessor.restore(first, tell)
    settings = processor.settings
    log.configure("text", level=settings.log_level, as_json=settings.log_json)
    limit_memory(settings.text_memory_bytes * 5 // 4)  # the gateway acts first
    wire.write(answers, [b"ready"])
    while (request := wire.read(requests)) is not None:
        size = sum(map(len, request))
        answer = _answer(processor, *request)
        del request
        wire.write(answers, answer)
        del answer
        if size > _LARGE_BYTES:
            _give_back_memory()
    return 0


def _give_back_memory() -> None:
    """Return freed memory to the system, where the C library can do that."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _answer(processor: TextProcessor, job: bytes, info: bytes, raw: bytes) -> Parts:
    """Return `b"ok"` and the result, or `b"error"` and an error."""
    kind = _BY_NAME[job]
    facts = SchedulerInfo.FromString(info)
    try:
        check_shape(raw, facts.max_model_len)
        draft = kind.draft(processor, raw, facts)
        return [b"ok", *kind.dump(draft.finish(processor.tokenizer.encode(draft.texts)))]
    except SurestepError as error:
        return [b"error", wire.dump_error(error)]
    except BaseException as error:  # noqa: BLE001  # a panic of native code is no Exception
        return [b"error", wire.dump_error(_unexpected(processor, error))]


def _unexpected(processor: TextProcessor, error: BaseException) -> SurestepError:
    """Return the error for an unexpected exception; near the memory limit that is the cause."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if isinstance(error, MemoryError) or peak > processor.settings.text_memory_bytes:
        return RequestTooLarge(TOO_MUCH_MEMORY)
    logger.error("a request could not be prepared", exc_info=error)
    return InternalError("a request could not be prepared")


if __name__ == "__main__":
    sys.exit(main())
