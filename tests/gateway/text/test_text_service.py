from __future__ import annotations

import asyncio
from typing import Any

from support.checkpoints import tiny_tokenizer
from support.fakes.scheduler import default_info
from surestep_common.errors import InvalidRequest
from surestep_gateway.apis.openai.job import TOKENIZE
from surestep_gateway.observability.metrics import GatewayMetrics
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.chat_template import ChatTemplate
from surestep_gateway.text.pool import TextPool
from surestep_gateway.text.service import Draft, Job, TextProcessor, TextService
from surestep_gateway.text.tokenizer import Texts, Tokenizer

BODY = bytearray(b'{"prompt": "%b"}' % (b"x" * 10_000))


def service() -> TextService:
    side = TextProcessor(
        settings=GatewaySettings.model_validate({"model": "tiny"}),
        tokenizer=Tokenizer(tiny_tokenizer.build()),
        template=ChatTemplate(None, {}),
    )
    return TextService(side, TextPool([side], GatewayMetrics(["tiny"])))


async def test_drafts_of_many_requests_share_no_iteration_of_the_loop() -> None:
    """Each may take milliseconds: whatever else is ready goes on between two of them."""
    text = service()
    iterations = 0
    seen: list[int] = []

    async def count() -> None:
        nonlocal iterations
        while True:
            iterations += 1
            await asyncio.sleep(0)

    def draft(side: TextProcessor, raw: bytes | bytearray, info: Any) -> Draft[bytes]:
        seen.append(iterations)
        if len(seen) % 3 == 0:
            raise InvalidRequest("wrong")
        return Draft(Texts([], add_special_tokens=False), lambda encoded: b"done")

    job: Job[bytes] = Job(b"tokenize", draft, TOKENIZE.dump, TOKENIZE.load)
    counting = asyncio.ensure_future(count())
    wanted = [text.prepare(job, BODY, default_info()) for _ in range(12)]
    answers = await asyncio.gather(*wanted, return_exceptions=True)
    counting.cancel()
    assert answers.count(b"done") == 8
    assert len(set(seen)) == len(seen) == 12


async def test_small_bodies_are_prepared_at_once() -> None:
    text = service()
    small = bytearray(b'{"prompt": "hello"}')
    assert text.at_once(TOKENIZE, BODY, default_info()) is None
    at_once = text.at_once(TOKENIZE, small, default_info())
    assert at_once == await text.prepare(TOKENIZE, small, default_info())
