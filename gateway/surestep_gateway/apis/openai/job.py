"""Jobs of the OpenAI endpoints: prepare chats and completions, and count tokens.

/tokenize and /detokenize are as vLLM has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from pydantic import Discriminator, Tag, TypeAdapter
from surestep_common.errors import InvalidRequest
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.request.parse import parse, parse_by, refuse_unsupported_in_prompt
from surestep_gateway.request.prepare import (
    chat_texts,
    check_countable,
    check_model,
    draft_chat,
    draft_completion,
)
from surestep_gateway.request.prepared import (
    PreparedRequest,
    check_vocab,
    dump_prepared,
    load_prepared,
)
from surestep_gateway.request.protocol import Body, TemplateFields, TokenIds
from surestep_gateway.text.service import Draft, Job, TextProcessor, dump_bytes, load_bytes
from surestep_gateway.text.tokenizer import Texts

_PREPARED = (dump_prepared, load_prepared)


class TokenizeBody(Body):
    """POST /tokenize, the prompt form"""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(TemplateFields):
    """POST /tokenize, the messages form"""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: TokenIds


def _kind_of_tokenize(body: Any) -> str:
    return "<chat>" if isinstance(body, dict) and "messages" in body else "<text>"


_TOKENIZE: TypeAdapter[TokenizeBody | TokenizeChatBody] = TypeAdapter(
    Annotated[
        Annotated[TokenizeBody, Tag("<text>")] | Annotated[TokenizeChatBody, Tag("<chat>")],
        Discriminator(_kind_of_tokenize),
    ]
)


def draft_tokenize(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """POST /tokenize, to the JSON of the response. Raise SurestepError."""
    body = parse_by(_TOKENIZE.validate_json, raw)
    check_model(processor.settings, body.model, info)
    refuse_unsupported_in_prompt(body)
    if isinstance(body, TokenizeChatBody):
        texts = chat_texts(processor, body, info)
    else:
        check_countable(body.prompt, "prompt", processor, info)
        texts = Texts([body.prompt], body.add_special_tokens is not False)

    def finish(encoded: Sequence[list[int]]) -> bytes:
        ids, tokenizer = encoded[0], processor.tokenizer
        answer = {
            "count": len(ids),
            "max_model_len": info.max_model_len,
            "tokens": ids,
            "token_strs": list(map(tokenizer.token, ids)) if body.return_token_strs else None,
        }
        return _answer(processor, answer)

    return Draft(texts, finish)


def draft_detokenize(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[bytes]:
    """POST /detokenize, to the JSON of the response. Raise SurestepError."""
    body = parse(DetokenizeBody, raw)
    check_model(processor.settings, body.model, info)
    check_vocab(body.tokens, "tokens", info.vocab_size)

    def finish(encoded: Sequence[list[int]]) -> bytes:
        text = processor.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _answer(processor, {"prompt": text})

    return Draft(Texts([], add_special_tokens=False), finish)


def _answer(processor: TextProcessor, content: dict[str, Any]) -> bytes:
    """Return JSON text. Raise InvalidRequest for a response over the size limit."""
    answer, most = orjson.dumps(content), processor.settings.max_answer_bytes
    if len(answer) > most:
        raise InvalidRequest(f"the answer is larger than {most} bytes: ask for less")
    return answer


CHAT: Job[PreparedRequest] = Job(b"chat", draft_chat, *_PREPARED)
COMPLETION: Job[PreparedRequest] = Job(b"completion", draft_completion, *_PREPARED)
TOKENIZE: Job[bytes] = Job(b"tokenize", draft_tokenize, dump_bytes, load_bytes)
DETOKENIZE: Job[bytes] = Job(b"detokenize", draft_detokenize, dump_bytes, load_bytes)
