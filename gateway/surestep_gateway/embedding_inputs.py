"""Inputs of embeddings: text or token ids to the ids of which vectors are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest
from surestep_proto.generate_pb2 import SchedulerInfo

from .embedding_body import EmbeddingBody, EmbeddingRequest
from .parse import parse
from .prepare import INLINE_PROMPTS, MAX_SENT_IDS, Draft, check_model
from .prompts import packed
from .sampling import beyond_context, check_vocab
from .text import TextSide
from .tokenizer import Texts, Tokenizer
from .unsupported import refuse_for_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedInputs:
    """A request for vectors that passed every check of text and ids."""

    body: EmbeddingBody  # without inputs
    inputs: Sequence[Sequence[int]]  # packed ids, in the order of the request


def draft_embedding(
    side: TextSide, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedInputs]:
    """POST /v1/embeddings. Raises SurestepError."""
    request = parse(EmbeddingRequest, raw)
    check_model(side.settings, request.model)
    refuse_for_embeddings(request)
    given, texts = _inputs(request)
    side.only_apart(len(given) + len(texts) > INLINE_PROMPTS)
    bounded = [_bounded(text, request, side.tokenizer, info) for text in texts]
    special = request.add_special_tokens is not False

    def finish(encoded: Sequence[list[int]]) -> PreparedInputs:
        ending = side.tokenizer.ending if special else ()
        fitted = [
            *(_fit(ids, (), request, info) for ids in given),
            *(_fit(ids, ending, request, info) for ids in encoded),
        ]
        total = sum(map(len, fitted))
        if total > max(MAX_SENT_IDS, info.max_pooled_len):
            raise InvalidRequest(
                f"input: all texts have {total} tokens, more than {MAX_SENT_IDS}", param="input"
            )
        return PreparedInputs(body=request, inputs=[packed(ids) for ids in fitted])

    return Draft(Texts(bounded, special), finish)


def _inputs(request: EmbeddingRequest) -> tuple[list[list[int]], list[str]]:
    """Those that came as ids, or those that came as text."""
    given = request.input
    if isinstance(given, str):
        return [], [given]
    if not given:
        raise InvalidRequest("'input' must not be empty", param="input")
    if isinstance(given[0], int):
        return [given], []
    if isinstance(given[0], list):
        return given, []
    return [], given


def _bounded(text: str, body: EmbeddingBody, tokenizer: Tokenizer, info: SchedulerInfo) -> str:
    """What can fit of a text that is to be truncated, else the text.

    Raises InvalidRequest for one that certainly has too many tokens, before anybody counts them.
    """
    most = tokenizer.most_chars(info.max_pooled_len)
    if most is None or len(text) <= most or (length := tokenizer.length(text)) <= most:
        return text
    if body.truncate_prompt_tokens is not None:
        return text[-most:] if body.truncation_side == "left" else text[:most]
    problem = f"an input has {length} characters, which cannot fit"
    raise beyond_context(info.max_pooled_len, problem, "input")


def _fit(
    ids: list[int], ending: Sequence[int], body: EmbeddingBody, info: SchedulerInfo
) -> list[int]:
    """Ids that can be pooled, cut as asked. Raises InvalidRequest.

    What is cut at its end keeps the `ending` that the tokenizer puts there: a model that pools the
    last token was trained to find it there.
    """
    most, keep = info.max_pooled_len, body.truncate_prompt_tokens
    if keep is not None:
        if keep > most:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {most}, got {keep}",
                param="truncate_prompt_tokens",
            )
        ids = _cut(ids, ending, most if keep < 0 else keep, left=body.truncation_side == "left")
    if not ids:
        raise InvalidRequest("an input has no tokens", param="input")
    if len(ids) > most:
        raise beyond_context(most, f"an input has {len(ids)} tokens", "input")
    check_vocab(ids, "input", info.vocab_size)
    return ids


def _cut(ids: list[int], ending: Sequence[int], keep: int, *, left: bool) -> list[int]:
    if len(ids) <= keep:
        return ids
    if left:
        return ids[len(ids) - keep :]
    if len(ending) >= keep:
        return ids[:keep]
    return [*ids[: keep - len(ending)], *ending]
