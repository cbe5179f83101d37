"""Prepared requests: prompts and sampling parameters as the schedulers take them.

Both are checked against the served model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import orjson
from surestep_common.errors import ContextOverflow, InvalidRequest
from surestep_common.request_params import check_entries, most_bad_word_ids
from surestep_proto.sampling_pb2 import SamplingParams, TokenSequence
from surestep_proto.scheduler_pb2 import GenerateRequest, SchedulerInfo

from surestep_gateway.grammars.fields import StructuredBody
from surestep_gateway.request.protocol import (
    ChatBody,
    CompletionBody,
    CompletionRequest,
    GenerationBody,
    Truncation,
)
from surestep_gateway.text.tokenizer import Texts, Tokenizer
from surestep_gateway.text.wire import Parts

# Fields that the sampling parameters or the prompts contain already.
_LEFT_OUT = {
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "stop_token_ids",
    *StructuredBody.model_fields,
}
MAX_CHARS = 1 << 15  # of all bad words together
_PIECE_CHARS = 4096  # of them, tokenised together; whatever is too much shows after one
_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_SHOWN_CHARS = 32  # of a key that is no token id
_SHOWN_IDS = 1024  # that are outside the vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    token_ids: Sequence[int]  # packed: four bytes an id, and copied at the speed of memory
    text: str | None = None  # where it will be echoed


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A generation request that has passed every check of text and parameters."""

    body: ChatBody | CompletionBody  # without messages and prompts
    prompts: Sequence[Prompt]
    sampling: SamplingParams  # without seed
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the tools' parameters
    promised: dict[str, bytes] = field(default_factory=dict)  # schemas that answers are checked by
    opening: str = ""  # end of a chat's prompt, without the part of the answer
    begun: str = ""  # the part of the answer that it ends with
    role: str = ""  # of a chat's answer


def packed(ids: Sequence[int]) -> Sequence[int]:
    """Return ids as the protocol's messages store them."""
    return GenerateRequest(prompt_ids=ids).prompt_ids


def bounded_text(
    text: str, tokenizer: Tokenizer, body: Truncation, max_tokens: int, param: str
) -> str:
    """Return `text`, or what truncation keeps of one that must exceed `max_tokens`.

    Raise ContextOverflow for a text that is certainly too long, before it is tokenised.
    """
    most = tokenizer.most_chars(max_tokens)
    if most is None or len(text) <= most or (length := tokenizer.length(text)) <= most:
        return text
    if body.truncate_prompt_tokens is not None:
        return text[kept_part(most, body)]
    problem = f"the prompt is too long: its {length} characters cannot fit"
    raise beyond_context(max_tokens, problem, param)


def ids_and_texts(
    given: str | list[str] | list[int] | list[list[int]], param: str
) -> tuple[list[list[int]], list[str]]:
    """Return the prompts given as ids, and those given as text. Raise InvalidRequest for none."""
    if isinstance(given, str):
        return [], [given]
    if not given:
        raise InvalidRequest(f"'{param}' must not be empty", param=param)
    if isinstance(given[0], int):
        return [given], []
    if isinstance(given[0], list):
        return given, []
    return [], given


def completion_prompt(
    ids: list[int],
    text: str | None,
    request: CompletionRequest,
    tokenizer: Tokenizer,
    info: SchedulerInfo,
) -> Prompt:
    """Return a prompt that fits, with its text if that is to be echoed. Raise InvalidRequest."""
    fitted = fit_prompt(ids, request, info, "prompt")
    if not request.echo:
        text = None
    elif text is None or len(fitted) < len(ids):
        text = tokenizer.decode(fitted, skip_special_tokens=False)
    return Prompt(token_ids=packed(fitted), text=text)


def fit_prompt(ids: list[int], body: GenerationBody, info: SchedulerInfo, param: str) -> list[int]:
    """Return the prompt, truncated as requested. Raise InvalidRequest if it cannot be served."""
    keep = body.truncate_prompt_tokens
    if keep is not None:
        if keep > info.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {info.max_model_len}, got {keep}",
                param="truncate_prompt_tokens",
            )
        keep = info.max_model_len - 1 if keep < 0 else keep
        ids = ids[kept_part(keep, body)] if len(ids) > keep else ids
    if not ids:
        raise InvalidRequest("the prompt has no tokens", param=param)
    if len(ids) >= info.max_model_len:
        raise beyond_context(
            info.max_model_len,
            f"the prompt is too long: its {len(ids)} tokens leave no room for output",
            param,
        )
    check_vocab(ids, param, info.vocab_size)
    return ids


def kept_part(count: int, body: Truncation) -> slice:
    """Return the slice that truncation keeps of a longer prompt: its beginning, or its end."""
    if (body.truncation_side or body.default_side) == "right":
        return slice(count)
    return slice(-count, None) if count else slice(0)


def beyond_context(most: int, problem: str, param: str) -> ContextOverflow:
    """Return the error for a prompt of more than `most` tokens.

    Clients shorten their chat when they see its code, its first words, or "prompt is too long".
    """
    return ContextOverflow(
        f"This model's maximum context length is {most} tokens. However, {problem}.", param=param
    )


def max_tokens(body: GenerationBody, prompt_len: int, info: SchedulerInfo) -> int | None:
    """Return the number of tokens to emit at most, as far as there is room.

    None means the model's default. Raise InvalidRequest for more `min_tokens`.
    """
    room = info.max_model_len - prompt_len
    param, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        param, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        if isinstance(body, ChatBody):
            return None
        asked = _COMPLETION_TOKENS
    asked = min(asked, room)
    if (body.min_tokens or 0) > asked:
        raise InvalidRequest(
            f"min_tokens={body.min_tokens} exceeds {param}={asked}", param="min_tokens"
        )
    return asked


def sampling_params(
    body: GenerationBody,
    info: SchedulerInfo,
    max_logprobs: int,
    *,
    bad_words: Sequence[TokenSequence] = (),
    num_sequences: int = 1,
    ending_ids: AbstractSet[int] = frozenset(),
) -> SamplingParams:
    """Return all parameters but the seed, for every sequence; those not given stay unset.

    `ending_ids` end an answer like the model's own.

    Raise InvalidRequest or RequestTooLarge naming the parameter.
    """
    stop_ids = {*_ids(body.stop_token_ids, "stop_token_ids", info.vocab_size)}
    if not body.ignore_eos:
        known = {id_ for id_ in ending_ids if id_ < info.vocab_size}
        stop_ids |= known.difference(info.eos_token_ids)
    params = SamplingParams(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        min_tokens=body.min_tokens,
        stop_token_ids=sorted(stop_ids),
        logit_bias=_logit_bias(body, info.vocab_size),
        allowed_token_ids=_ids(body.allowed_token_ids, "allowed_token_ids", info.vocab_size),
        bad_words=bad_words,
    )
    _set_logprobs(params, body, max_logprobs)
    check_entries(params, num_sequences)
    return params


def _ids(ids: Iterable[int] | None, param: str, vocab_size: int) -> list[int]:
    checked = list(ids or ())
    check_vocab(checked, param, vocab_size)
    return checked


def check_vocab(ids: list[int], param: str, vocab_size: int) -> None:
    """Raise InvalidRequest when ids are outside the model's vocabulary."""
    if ids and max(ids) >= vocab_size:
        wrong = list(dict.fromkeys(i for i in ids if i >= vocab_size))
        named = ", ".join(map(str, wrong[:_SHOWN_IDS])) + ", ..." * (len(wrong) > _SHOWN_IDS)
        raise InvalidRequest(
            f"{param}: not in the vocabulary of {vocab_size} ids: {named}", param=param
        )


def _logit_bias(body: GenerationBody, vocab_size: int) -> dict[int, float]:
    given = body.logit_bias or {}
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        named = ", ".join(f"'{key[:_SHOWN_CHARS]}'" for key in wrong)
        raise InvalidRequest(f"logit_bias: not a token id: {named}", param="logit_bias")
    bias = {int(key): value for key, value in given.items()}
    check_vocab(list(bias), "logit_bias", vocab_size)
    return bias


def _set_logprobs(params: SamplingParams, body: GenerationBody, max_logprobs: int) -> None:
    top = num_logprobs(body)
    if top is not None:
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        _check_logprobs(top, param, max_logprobs)
        params.want_logprobs = True
        params.num_top_logprobs = top
    prompt = num_prompt_logprobs(body)
    if prompt is not None:
        _check_logprobs(prompt, "prompt_logprobs", max_logprobs)
        params.want_prompt_logprobs = True
        params.num_top_prompt_logprobs = prompt


def num_logprobs(body: GenerationBody) -> int | None:
    """Return the alternatives per emitted token; None for no log-probabilities."""
    if not isinstance(body, ChatBody):
        logprobs: int | None = getattr(body, "logprobs", None)
        return logprobs
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true", param="top_logprobs")
    return None


def num_prompt_logprobs(body: GenerationBody) -> int | None:
    """Return the alternatives per prompt token: explicit, or implied by an echo with logprobs."""
    if body.prompt_logprobs is None and getattr(body, "echo", None):
        return num_logprobs(body)
    return body.prompt_logprobs


def _check_logprobs(count: int, param: str, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{param} must be at most {limit}, got {count}", param=param)


def total_chars(words: Sequence[str]) -> int:
    return sum(map(len, words))


def bad_words(
    words: Sequence[str], tokenizer: Tokenizer, num_sequences: int
) -> list[TokenSequence]:
    """Return the token ids of each word at the start of a text, and after a space.

    Raise InvalidRequest for more than a request with so many sequences may have.
    """
    num_chars = total_chars(words)
    if num_chars > MAX_CHARS:
        raise _refusal(f"{num_chars} characters are more than {MAX_CHARS}")
    found: list[TokenSequence] = []
    left = most = most_bad_word_ids(num_sequences)
    for piece in _pieces(words):
        bare = [word.lstrip() for word in piece]
        spellings = [*bare, *(" " + word for word in bare)]
        ids = tokenizer.encode(Texts(spellings, add_special_tokens=False))
        for word, first, spaced in zip(piece, ids, ids[len(piece) :], strict=False):
            if not first:
                raise _refusal(f"'{word}' has no tokens")
            spelt = [first] if spaced == first else [first, spaced]
            left -= sum(map(len, spelt))
            if left < 0:
                raise _refusal(f"more than {most} tokens, for {num_sequences} sequences")
            found += [TokenSequence(token_ids=one) for one in spelt]
    return found


def _pieces(words: Sequence[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    num_chars = 0
    for word in words:
        if piece and num_chars + len(word) > _PIECE_CHARS:
            yield piece
            piece, num_chars = [], 0
        piece.append(word)
        num_chars += len(word)
    if piece:
        yield piece


def _refusal(what: str) -> InvalidRequest:
    return InvalidRequest(f"bad_words: {what}", param="bad_words")


def dump_prepared(prepared: PreparedRequest) -> Parts:
    """Serialise a generation request."""
    kind = ChatBody if isinstance(prepared.body, ChatBody) else CompletionBody
    fields = kind.model_fields.keys() - _LEFT_OUT
    body = prepared.body.model_dump_json(include=fields, exclude_none=True)
    about = {
        "kind": kind.__name__,
        "body": orjson.Fragment(body),
        "opening": prepared.opening,
        "begun": prepared.begun,
        "role": prepared.role,
        "texts": [prompt.text for prompt in prepared.prompts],
        "promised": list(prepared.promised),
    }
    ids = (GenerateRequest(prompt_ids=prompt.token_ids) for prompt in prepared.prompts)
    return [
        orjson.dumps(about),
        json.dumps(prepared.schemas, ensure_ascii=False).encode(),  # integers of any size
        prepared.sampling.SerializeToString(),
        *prepared.promised.values(),
        *(one.SerializeToString() for one in ids),
    ]


def load_prepared(parts: Sequence[bytes]) -> PreparedRequest:
    about, schemas, sampling, *rest = orjson.loads(parts[0]), *parts[1:]
    names, ids = about["promised"], rest[len(about["promised"]) :]
    kind = ChatBody if about["kind"] == ChatBody.__name__ else CompletionBody
    return PreparedRequest(
        body=kind.model_validate(about["body"]),
        prompts=[
            Prompt(token_ids=GenerateRequest.FromString(one).prompt_ids, text=text)
            for one, text in zip(ids, about["texts"], strict=True)
        ],
        sampling=SamplingParams.FromString(sampling),
        schemas=json.loads(schemas),
        promised=dict(zip(names, rest, strict=False)),
        opening=about["opening"],
        begun=about["begun"],
        role=about["role"],
    )
