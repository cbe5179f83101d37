"""Inputs of embeddings: from text or token ids to the ids that the model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.text.text_processor import TextProcessor
from surestep_gateway.text.tokenizer import Texts

from .embedding_body import EmbeddingBody, EmbeddingRequest, RerankRequest, ScoreRequest
from .parse import parse
from .prepare import INLINE_PROMPTS, MAX_SENT_IDS, Draft, check_model
from .prompts import bounded_text, ids_and_texts, packed
from .sampling import beyond_context, check_vocab, kept_part
from .unsupported import refuse_for_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """An embedding request that has passed every check of text and ids."""

    body: EmbeddingBody  # without inputs
    inputs: Sequence[Sequence[int]]  # packed ids, in the order of the request


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScores:
    """A request to compare texts, as inputs of embeddings."""

    inputs: PreparedInputs
    pairs: Sequence[tuple[int, int]]  # of inputs, each with a score
    documents: Sequence[str] | None = None  # shown with the results
    top_n: int | None = None  # of a ranking, how many; None for scores in their order


def draft_embedding(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedInputs]:
    """POST /v1/embeddings. Raises SurestepError."""
    request = parse(EmbeddingRequest, raw)
    given, texts = ids_and_texts(request.input, "input")
    named = [(text, "input") for text in texts]
    return _draft(processor, request, given, named, info)


def draft_score(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedScores]:
    """POST /v1/score. Raises SurestepError."""
    request = parse(ScoreRequest, raw)
    first, second = ([x] if isinstance(x, str) else x for x in (request.text_1, request.text_2))
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1: must be one text, or {len(second)} like text_2, not {len(first)}",
            param="text_1",
        )
    pairs = [(n % len(first), len(first) + n) for n in range(len(second))]
    named = [*((text, "text_1") for text in first), *((text, "text_2") for text in second)]
    draft = _draft(processor, request, [], named, info)
    return Draft(
        draft.texts,
        lambda encoded: PreparedScores(inputs=draft.finish(encoded), pairs=pairs),
    )


def draft_rerank(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedScores]:
    """POST /v1/rerank. Raises SurestepError."""
    request = parse(RerankRequest, raw)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    pairs = [(0, 1 + n) for n in range(len(documents))]
    named = [(request.query, "query"), *((text, "documents") for text in documents)]
    draft = _draft(processor, request, [], named, info)
    return Draft(
        draft.texts,
        lambda encoded: PreparedScores(
            inputs=draft.finish(encoded),
            pairs=pairs,
            documents=None if request.return_documents is False else documents,
            top_n=request.top_n or len(documents),
        ),
    )


def _draft(
    processor: TextProcessor,
    request: EmbeddingBody,
    given: Sequence[list[int]],
    texts: Sequence[tuple[str, str]],
    info: SchedulerInfo,
) -> Draft[PreparedInputs]:
    """Prepare inputs: ids, and texts with the names of their fields. Raise SurestepError."""
    check_model(processor.settings, request.model)
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
            *(_fit(ids, (), request, info, "input") for ids in given),
            *(
                _fit(ids, ending, request, info, param)
                for ids, (_, param) in zip(encoded, texts, strict=True)
            ),
        ]
        total = sum(map(len, fitted))
        if total > max(MAX_SENT_IDS, most):
            param = texts[-1][1] if texts else "input"
            raise InvalidRequest(
                f"{param}: all texts have {total} tokens, more than {MAX_SENT_IDS}", param=param
            )
        return PreparedInputs(body=request, inputs=[packed(ids) for ids in fitted])

    return Draft(Texts(bounded, special), finish)


def _fit(
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
