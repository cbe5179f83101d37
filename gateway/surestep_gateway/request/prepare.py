"""Preparing requests: from the bytes of a body to calls of schedulers, or to a response.

Plain functions of the body, the text processor and the facts of the model, in two steps with the
encoding of text between them. They run on the gateway's event loop for small bodies and in a text
process for the others; work too heavy for the loop raises NeedsProcess there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from surestep_common.errors import InvalidRequest, ModelNotFound, RequestTooLarge
from surestep_common.request_params import check_prompt_logprobs
from surestep_proto.sampling_pb2 import SamplingParams
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.grammars.reasoning import Wanted
from surestep_gateway.request.parse import refuse_unsupported
from surestep_gateway.request.prepared import (
    PreparedRequest,
    Prompt,
    bad_words,
    bounded_text,
    check_vocab,
    completion_prompt,
    fit_prompt,
    ids_and_texts,
    kept_part,
    packed,
    sampling_params,
    total_chars,
)
from surestep_gateway.settings.config import GatewaySettings
from surestep_gateway.text.service import Draft, TextProcessor
from surestep_gateway.text.tokenizer import Texts

from .output_format import (
    callable_tools,
    check_tool_choice,
    constrain,
    ending_ids,
    grammar_field,
    promised_of,
    wanted_output,
)
from .parse import parse
from .protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    TemplateFields,
)
from .render import answering_role, begun, echoed, render_chat

INLINE_PROMPTS = 64  # in a body that is prepared on the event loop
INLINE_BAD_WORD_CHARS = 1024  # of all of them
MAX_SEQUENCES = 1024  # in one request
MAX_SENT_IDS = 1 << 23  # of prompts, once for each sequence
MAX_ALL_PROMPT_LOGPROBS = 1 << 22  # in the answer to one request
MAX_TOOLS_BYTES = 1 << 20  # of their JSON
MIN_TOKENIZE_CHARS = 1 << 20  # are counted by /tokenize whatever fits into a prompt
_TAIL_CHARS = 256  # of a prompt; what reasoning it begins is seen there

T = TypeVar("T")


def draft_chat(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """POST /v1/chat/completions. Raise SurestepError."""
    return draft_chat_request(processor, parse(ChatRequest, raw), info)


def draft_chat_request(
    processor: TextProcessor, request: ChatRequest, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """Check and render a chat. Raise SurestepError."""
    _check_common(processor, request, info)
    check_tool_choice(processor.settings, request)
    schemas = _schemas(request)
    wanted = _wanted(processor, request)
    chat = render_chat(processor, request)
    text = bounded_text(chat.text, processor.tokenizer, request, info.max_model_len, "messages")
    cut = len(text) < len(chat.text)
    if cut and request.echo:  # of any size, once for each choice
        raise InvalidRequest("'echo' is not available for a chat of this size", param="echo")
    kept = kept_part(len(text), request) if cut else slice(None)
    texts = chat.texts(processor, kept, add_special_tokens=bool(request.add_special_tokens))

    def finish(encoded: Sequence[list[int]]) -> PreparedRequest:
        answered = begun(request)
        opening = chat.text.rstrip().removesuffix(answered.rstrip()).rstrip()
        ids = packed(fit_prompt(encoded[0], request, info, "messages"))
        prompt = Prompt(token_ids=ids, text=echoed(request))
        prepared = PreparedRequest(
            body=request,
            prompts=[prompt],
            sampling=_sampling(processor, request, [prompt], info),
            schemas=schemas,
            promised=promised_of(wanted),
            opening=opening[-_TAIL_CHARS:],
            begun=answered,
            role=answering_role(processor.settings, request),
        )
        constrain(processor, prepared, wanted)
        return prepared

    return Draft(texts, finish)


def draft_completion(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """POST /v1/completions. Raises SurestepError."""
    return draft_completion_request(processor, parse(CompletionRequest, raw), info)


def draft_completion_request(
    processor: TextProcessor, request: CompletionRequest, info: SchedulerInfo
) -> Draft[PreparedRequest]:
    """Check a completion. Raise SurestepError."""
    _check_common(processor, request, info)
    wanted = _wanted(processor, request)
    given, texts = ids_and_texts(request.prompt, "prompt")
    most = info.max_model_len
    bounded = [bounded_text(text, processor.tokenizer, request, most, "prompt") for text in texts]
    _check_number(request, len(given) + len(texts))
    _check_emitted(request, len(given) + len(texts), info)
    processor.only_apart(len(given) + len(texts) > INLINE_PROMPTS)

    def finish(encoded: Sequence[list[int]]) -> PreparedRequest:
        pairs = [*((ids, None) for ids in given), *zip(encoded, bounded, strict=True)]
        prompts = [completion_prompt(*pair, request, processor.tokenizer, info) for pair in pairs]
        sampling = _sampling(processor, request, prompts, info)
        prepared = PreparedRequest(
            body=request, prompts=prompts, sampling=sampling, promised=promised_of(wanted)
        )
        constrain(processor, prepared, wanted)
        return prepared

    return Draft(Texts(bounded, request.add_special_tokens is not False), finish)


def chat_texts(processor: TextProcessor, body: TemplateFields, info: SchedulerInfo) -> Texts:
    """Return what to encode of a chat whose tokens are counted. Raise InvalidRequest."""
    chat = render_chat(processor, body)
    check_countable(chat.text, "messages", processor, info)
    return chat.texts(processor, slice(None), add_special_tokens=bool(body.add_special_tokens))


def check_countable(text: str, param: str, processor: TextProcessor, info: SchedulerInfo) -> None:
    """Raise InvalidRequest for a text that takes too long to tokenise."""
    most = processor.tokenizer.most_chars(info.max_model_len)
    if most is not None and len(text) > max(most, MIN_TOKENIZE_CHARS):
        raise InvalidRequest(
            f"the text has {len(text)} characters, more than a prompt of {info.max_model_len} "
            f"tokens can have and more than the {MIN_TOKENIZE_CHARS} that are counted in any case",
            param=param,
        )


def check_model(settings: GatewaySettings, name: str | None, info: SchedulerInfo) -> None:
    """Raise NotFound for what is neither the model's name nor an adapter's."""
    if name is None or name in settings.model_names:
        return
    if not (info.loads_adapters or any(adapter.name == name for adapter in info.adapters)):
        raise ModelNotFound(f"the model '{name}' does not exist", param="model")


def _check_common(processor: TextProcessor, request: GenerationBody, info: SchedulerInfo) -> None:
    check_model(processor.settings, request.model, info)
    if info.headless:
        raise InvalidRequest("the model writes no text, it makes embeddings", param="model")
    n, most = request.n or 1, processor.settings.max_n
    if n > most:
        raise InvalidRequest(f"n must be at most {most}, got {n}", param="n")
    refuse_unsupported(request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("'stream_options' needs 'stream': true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequest(
            "'prompt_logprobs' are not available with 'stream'", param="prompt_logprobs"
        )
    processor.only_apart(total_chars(request.bad_words or ()) > INLINE_BAD_WORD_CHARS)


def _check_number(request: CompletionRequest, num_prompts: int) -> None:
    if num_prompts * (request.n or 1) > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={request.n} are more than {MAX_SEQUENCES} sequences",
            param="n",
        )


def _check_emitted(request: CompletionRequest, num_prompts: int, info: SchedulerInfo) -> None:
    """Check what an answer goes on behind. Raise InvalidRequest where it could become another."""
    if request.emitted_ids is None:
        return
    check_vocab(request.emitted_ids, "emitted_ids", info.vocab_size)
    problem = ""
    if num_prompts * (request.n or 1) > 1:
        problem = "are those of one answer: one prompt, and no 'n'"
    elif request.echo or request.prompt_logprobs is not None:
        problem = "follow the prompt: 'echo' and 'prompt_logprobs' were answered before them"
    elif request.seed is None and request.temperature != 0:
        problem = "need the 'seed' that they were drawn with, or 'temperature': 0"
    if problem:
        raise InvalidRequest(f"'emitted_ids' {problem}", param="emitted_ids")


def _wanted(processor: TextProcessor, request: GenerationBody) -> Wanted | None:
    """Return what the output must be. Raise InvalidRequest; on the event loop NeedsProcess."""
    field = grammar_field(request)
    processor.only_apart(field is not None)
    with processor.checking(field or ""):
        return wanted_output(processor, request)


def _schemas(request: ChatRequest) -> dict[str, dict[str, Any]]:
    """Return the parameters of the tools that may be called. Raise RequestTooLarge."""
    tools = request.tools or ()
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise RequestTooLarge(
            f"tools must have at most {MAX_TOOLS_BYTES} bytes, got {size}", param="tools"
        )
    return {function.name: function.parameters or {} for _, function in callable_tools(request)}


def _sampling(
    processor: TextProcessor,
    request: GenerationBody,
    prompts: Sequence[Prompt],
    info: SchedulerInfo,
) -> SamplingParams:
    """Return the parameters of every sequence. Raise InvalidRequest, also for their total."""
    num_sequences = len(prompts) * (request.n or 1)
    chat = isinstance(request, ChatRequest)
    ends = ending_ids(processor.settings, processor.tokenizer) if chat else set()
    params = sampling_params(
        request,
        info,
        processor.settings.max_logprobs,
        bad_words=bad_words(request.bad_words or (), processor.tokenizer, num_sequences),
        num_sequences=num_sequences,
        ending_ids=ends,
    )
    check_prompt_logprobs(params, max(len(prompt.token_ids) for prompt in prompts))
    ids = sum(len(prompt.token_ids) for prompt in prompts) * (request.n or 1)
    if ids > max(MAX_SENT_IDS, info.max_model_len):
        raise InvalidRequest(
            f"n: the prompts of all sequences have {ids} tokens, more than {MAX_SENT_IDS}",
            param="n",
        )
    entries = ids * (1 + params.num_top_prompt_logprobs)
    if params.want_prompt_logprobs and entries > MAX_ALL_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"the answer would have {entries} log-probabilities of prompts, more than "
            f"{MAX_ALL_PROMPT_LOGPROBS}",
            param="prompt_logprobs" if request.prompt_logprobs is not None else "logprobs",
        )
    return params
