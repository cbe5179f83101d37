"""The bodies of requests for embeddings: OpenAI's fields and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from surestep_gateway.request.protocol import (
    UNSUPPORTED_KIND,
    Body,
    Natural,
    Positive,
    RequestId,
    TokenIds,
    Truncation,
    User,
    Whole,
    kind_of_prompt,
)

MAX_INPUTS = 2048  # as at OpenAI


def _refused_chat(value: Any) -> None:
    if value:
        raise PydanticCustomError(UNSUPPORTED_KIND, "write them into 'input'")


class EmbeddingBody(Truncation):
    """The options of an embedding request besides its inputs. None means the default."""

    default_side: ClassVar[Literal["left", "right"]] = "right"

    model: str | None = None
    messages: Annotated[None, BeforeValidator(_refused_chat)] = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: User | None = None

    add_special_tokens: bool | None = None
    normalize: bool | None = None
    use_activation: bool | None = None  # the same, by its newer name
    priority: Annotated[Whole, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: RequestId | None = None


class EmbeddingRequest(EmbeddingBody):
    """POST /v1/embeddings"""

    input: Annotated[
        Annotated[str, Tag("str")]
        | Annotated[TokenIds, Tag("list[int]")]
        | Annotated[list[str], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("list[str]")]
        | Annotated[
            list[TokenIds], Field(max_length=MAX_INPUTS, fail_fast=True), Tag("list[list[int]]")
        ],
        Discriminator(kind_of_prompt),
    ]


def _kind_of_texts(given: Any) -> str:
    return "<texts>" if isinstance(given, list) else "<text>"


OneOrMore = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag("<texts>")
    ],
    Discriminator(_kind_of_texts),
]


class ScoreFields(EmbeddingBody):
    """The options of a request to compare texts."""

    max_tokens_per_query: Natural | None = None  # of each, the first ones; 0 or None: all
    max_tokens_per_doc: Natural | None = None
    instruction: str | None = None  # to a model that judges
    chat_template_kwargs: dict[str, Any] | None = None  # of its prompt


class ScoreRequest(ScoreFields):
    """POST /v1/score: one text beside each of several, or as many pairs as there are texts."""

    text_1: OneOrMore = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: OneOrMore = Field(
        validation_alias=AliasChoices("text_2", "documents", "items", "data_2")
    )


class TextDocument(Body):
    """A document with its text under a name, as Cohere's and Jina's clients may send it."""

    text: str


def _kind_of_document(document: Any) -> str:
    return "<object>" if isinstance(document, dict | TextDocument) else "<text>"


class RerankRequest(ScoreFields):
    """POST /v1/rerank: documents by their likeness to a query."""

    query: str
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("<text>")] | Annotated[TextDocument, Tag("<object>")],
                Discriminator(_kind_of_document),
            ]
        ],
        Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    ]
    top_n: Natural | None = None  # 0 or None: all
    return_documents: bool | None = None  # not False: results have their texts
