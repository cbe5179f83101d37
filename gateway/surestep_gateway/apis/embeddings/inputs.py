"""Inputs of embeddings: from text or token ids to the ids that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.request.parse import parse, refuse_for_embeddings
from surestep_gateway.request.prepare import INLINE_PROMPTS, MAX_SENT_IDS, check_model
from surestep_gateway.request.prepared import (
    beyond_context,
    bounded_text,
    check_vocab,
    ids_and_texts,
    kept_part,
    packed,
)
from surestep_gateway.text.service import Draft, TextProcessor
from surestep_gateway.text.tokenizer import Texts

from .body import EmbeddingBody, EmbeddingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """An embedding request that has passed every check of text and ids."""

    body: EmbeddingBody  # without inputs
    inputs: Sequence[Sequence[int]]  # packed ids, in the order of the request
    label_ids: Sequence[int] = ()  # tokens whose logits are wanted instead of a hidden state


def draft_embedding(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedInputs]:
    """POST /v1/embeddings. Raises SurestepError."""
    request = parse(EmbeddingRequest, raw)
    given, texts = ids_and_texts(request.input, "input")
    named = [(text, "input") for text in texts]
    return draft_inputs(processor, request, given, named, info)


def draft_inputs(
    processor: TextProcessor,
    request: EmbeddingBody,
    given: Sequence[list[int]],
    texts: Sequence[tuple[str, str]],
    info: SchedulerInfo,
) -> Draft[PreparedInputs]:
    """Prepare inputs: ids, and texts with the names of their fields. Raise SurestepError."""
    check_model(processor.settings, request.model, info)
    refuse_for_embeddings(request)
    processor.only_apart(len(given) + len(texts) > INLINE_PROMPTS)
    most = info.max_pooled_len
    bounded = [
        bounded_text(text, processor.tokenizer, request, most, param) for text, param in texts
    ]
    special = request.add_special_tokens is not False

    def finish(encoded: Sequence[list[int]]) -> PreparedInputs:
        ending = processor.tokenizer.ending if special else ()
        fitted = [
            *(fit_input(ids, (), request, info, "input") for ids in given),
            *(
                fit_input(ids, ending, request, info, param)
                for ids, (_, param) in zip(encoded, texts, strict=True)
            ),
        ]
        inputs = packed_inputs(fitted, texts[-1][1] if texts else "input", info)
        return PreparedInputs(body=request, inputs=inputs)

    return Draft(Texts(bounded, special), finish)


def packed_inputs(
    fitted: Sequence[list[int]], param: str, info: SchedulerInfo
) -> list[Sequence[int]]:
    """Return the ids of all inputs, packed. Raise InvalidRequest for too many of them."""
    total = sum(map(len, fitted))
    if total > max(MAX_SENT_IDS, info.max_pooled_len):
        raise InvalidRequest(
            f"{param}: all texts have {total} tokens, more than {MAX_SENT_IDS}", param=param
        )
    return [packed(ids) for ids in fitted]


def fit_input(
    ids: list[int], ending: Sequence[int], body: EmbeddingBody, info: SchedulerInfo, param: str
) -> list[int]:
    """Return ids that can be pooled, truncated as requested. Raise InvalidRequest.

    Truncation at the end keeps the `ending` that the tokenizer puts there: a model that pools the
    last token was trained with that ending.
    """
    most, keep = info.max_pooled_len, body.truncate_prompt_tokens
    if keep is not None:
        if keep > most:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {most}, got {keep}",
                param="truncate_prompt_tokens",
            )
        ids = _cut(ids, ending, most if keep < 0 else keep, body)
    if not ids:
        raise InvalidRequest("an input has no tokens", param=param)
    if len(ids) > most:
        raise beyond_context(most, f"an input has {len(ids)} tokens", param)
    check_vocab(ids, param, info.vocab_size)
    return ids


def _cut(ids: list[int], ending: Sequence[int], keep: int, body: EmbeddingBody) -> list[int]:
    if len(ids) <= keep:
        return ids
    kept, inner = ids[kept_part(keep, body)], keep - len(ending)
    return [*kept[:inner], *ending] if inner > 0 else kept
