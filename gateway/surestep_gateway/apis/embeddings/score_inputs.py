"""Inputs of scores: pairs of texts as embeddings to compare, or as questions to a judge.

A model that `--hf-overrides` names a judge (`classifier_from_token`) reads each pair as one prompt
and says by the logits of these tokens whether the document meets the query: the way of
Qwen3-Reranker, mxbai-rerank-v2 and bge-reranker-v2-gemma.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surestep_common.errors import InvalidRequest, UnsupportedParameter
from surestep_proto.scheduler_pb2 import SchedulerInfo

from surestep_gateway.request.parse import parse, refuse_for_embeddings
from surestep_gateway.request.prepare import check_model
from surestep_gateway.request.prepared import bounded_text
from surestep_gateway.request.protocol import TemplateFields
from surestep_gateway.request.render import RenderedChat, render_chat
from surestep_gateway.text.service import Draft, TextProcessor
from surestep_gateway.text.special_tokens import Hidden
from surestep_gateway.text.tokenizer import Texts, Tokenizer

from .body import RerankRequest, ScoreFields, ScoreRequest
from .inputs import PreparedInputs, draft_inputs, fit_input, packed_inputs

INLINE_PAIRS = 8  # rendered on the event loop
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_RULE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "{yes}" or "{no}".'
)
_OF_JUDGES = ("instruction", "chat_template_kwargs")
_OF_VECTORS = ("dimensions", "encoding_format", "truncate_prompt_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedScores:
    """A request to compare texts, as inputs of embeddings or of a judge."""

    inputs: PreparedInputs
    # Of inputs, each with a score; None: every input is a pair, which is judged.
    pairs: Sequence[tuple[int, int]] | None
    documents: Sequence[str] | None = None  # shown with the results
    top_n: int | None = None  # of a ranking, how many; None for scores in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Texts of a request, with the names of their fields, and the pairs of them."""

    first: Sequence[str]
    second: Sequence[str]
    pairs: Sequence[tuple[int, int]]  # of indices into each
    params: tuple[str, str]


def judging_ids(processor: TextProcessor) -> tuple[int, ...]:
    """Return the ids of the tokens that say no and yes, or yes alone; empty if none is named.

    Raise InvalidRequest for what is no token, and for one token without words for the question.
    """
    tokens = processor.settings.judging_tokens
    ids = tuple(processor.tokenizer.id(token) for token in tokens)
    for token, found in zip(tokens, ids, strict=True):
        if found is None:
            raise InvalidRequest(f"--hf-overrides: classifier_from_token: '{token}' is no token")
    if len(tokens) == 1 and not processor.template.writes_pairs:
        raise InvalidRequest(
            "--hf-overrides: classifier_from_token names one token: the question needs a "
            "--chat-template with the roles 'query' and 'document'"
        )
    return tuple(found for found in ids if found is not None)


def draft_score(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedScores]:
    """POST /v1/score. Raise SurestepError."""
    request = parse(ScoreRequest, raw)
    first, second = ([x] if isinstance(x, str) else x for x in (request.text_1, request.text_2))
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1: must be one text, or {len(second)} like text_2, not {len(first)}",
            param="text_1",
        )
    pairs = [(n % len(first), n) for n in range(len(second))]
    params = ("text_1", "text_2")
    compared = _Compared(first=first, second=second, pairs=pairs, params=params)
    return _draft(processor, request, compared, info)


def draft_rerank(
    processor: TextProcessor, raw: bytes | bytearray, info: SchedulerInfo
) -> Draft[PreparedScores]:
    """POST /v1/rerank. Raise SurestepError."""
    request = parse(RerankRequest, raw)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    compared = _Compared(
        first=[request.query],
        second=documents,
        pairs=[(0, n) for n in range(len(documents))],
        params=("query", "documents"),
    )
    return _draft(
        processor,
        request,
        compared,
        info,
        documents=None if request.return_documents is False else documents,
        top_n=request.top_n or len(documents),
    )


def _draft(
    processor: TextProcessor,
    request: ScoreFields,
    compared: _Compared,
    info: SchedulerInfo,
    documents: Sequence[str] | None = None,
    top_n: int | None = None,
) -> Draft[PreparedScores]:
    lengths = request.max_tokens_per_query, request.max_tokens_per_doc
    processor.only_apart(any(lengths))
    first, second = (
        [processor.tokenizer.beginning(text, most) for text in texts] if most else texts
        for texts, most in zip((compared.first, compared.second), lengths, strict=True)
    )
    pairs: list[tuple[int, int]] | None = None
    if processor.settings.judging_tokens:
        asked = [(first[one], second[other]) for one, other in compared.pairs]
        draft = _draft_judged(processor, request, asked, compared.params[1], info)
    else:
        for name in _OF_JUDGES:
            if getattr(request, name):
                problem = f"'{name}' is not supported: the model does not judge, it compares texts"
                raise UnsupportedParameter(problem, param=name)
        of_first, of_second = compared.params
        named = [*((text, of_first) for text in first), *((text, of_second) for text in second)]
        draft = draft_inputs(processor, request, [], named, info)
        pairs = [(one, len(first) + other) for one, other in compared.pairs]
    return Draft(
        draft.texts,
        lambda encoded: PreparedScores(
            inputs=draft.finish(encoded), pairs=pairs, documents=documents, top_n=top_n
        ),
    )


def _draft_judged(
    processor: TextProcessor,
    request: ScoreFields,
    pairs: Sequence[tuple[str, str]],
    param: str,
    info: SchedulerInfo,
) -> Draft[PreparedInputs]:
    """Prepare one prompt for each query and document. Raise SurestepError."""
    check_model(processor.settings, request.model, info)
    refuse_for_embeddings(request)
    if info.headless:
        raise InvalidRequest("the model has no output head: it cannot judge", param="model")
    for name in _OF_VECTORS:
        if getattr(request, name) is not None:
            raise UnsupportedParameter(f"'{name}' is not supported by a judge", param=name)
    processor.only_apart(len(pairs) > INLINE_PAIRS)
    label_ids = judging_ids(processor)
    rule = _rule(processor, label_ids)
    chats = [render_chat(processor, _question(request, rule, *pair)) for pair in pairs]
    for chat in chats:
        bounded_text(chat.text, processor.tokenizer, request, info.max_pooled_len, param)

    def finish(encoded: Sequence[list[int]]) -> PreparedInputs:
        fitted = [fit_input(ids, (), request, info, param) for ids in encoded]
        inputs = packed_inputs(fitted, param, info)
        return PreparedInputs(body=request, inputs=inputs, label_ids=label_ids)

    special = request.add_special_tokens
    if special is None:  # a chat template writes them itself, one for pairs does not
        special = processor.template.writes_pairs
    return Draft(_texts(processor.tokenizer, chats, add_special_tokens=special), finish)


def _texts(
    tokenizer: Tokenizer, chats: Sequence[RenderedChat], *, add_special_tokens: bool
) -> Texts:
    """Return what to encode of all; one text with hidden tokens has all written by their names."""
    if all(chat.hidden is None for chat in chats):
        return Texts([chat.text for chat in chats], add_special_tokens)
    nothing = Hidden([], {})
    named = [tokenizer.named.text(chat.stand_ins, chat.hidden or nothing) for chat in chats]
    return Texts(named, add_special_tokens, named=True)


def _rule(processor: TextProcessor, label_ids: Sequence[int]) -> str | None:
    """Return what a judge is told; None where the template has its own words for a pair."""
    if processor.template.writes_pairs:
        return None
    no, yes = map(processor.tokenizer.word, label_ids)
    return _RULE.format(yes=yes, no=no)


def _question(request: ScoreFields, rule: str | None, query: str, document: str) -> TemplateFields:
    """Return the chat that asks for a judgement, as Qwen3-Reranker was trained to read it.

    A template with the roles `query` and `document` (vLLM's score templates) has no `rule`.
    """
    given = request.chat_template_kwargs or {}
    task = given.get("instruction", request.instruction)
    if rule is None:
        said = [("query", query), ("document", document)]
        told = [("system", task)] if isinstance(task, str) else []
        given = given | ({"instruction": task} if task is not None else {})
    else:
        task = task or _TASK
        said = [("user", f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}")]
        told = [("system", rule)]
        given = {"enable_thinking": False} | given
    messages = [{"role": role, "content": text} for role, text in (*told, *said)]
    return TemplateFields.model_validate({"messages": messages, "chat_template_kwargs": given})
