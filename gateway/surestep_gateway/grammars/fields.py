"""The fields by which requests say what their output must be: OpenAI's, vLLM's, and those that
SGLang and llama.cpp have for the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from surestep_common.request_params import MAX_CHOICES

MAX_STRUCTURES = 256

Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(max_length=MAX_CHOICES, fail_fast=True),
]
JsonSchema = str | dict[str, Any]  # JSON text, or the object


class _Fields(BaseModel):
    """Fields of which unknown ones are kept: they may say what an output must be."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class NamedSchema(_Fields):
    """A schema under a name; `strict` is without effect: every schema is kept to."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Structure(_Fields):
    """JSON between a beginning and an end."""

    begin: Annotated[str, Field(min_length=1)]
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    end: str = ""


Structures = Annotated[list[Structure], Field(max_length=MAX_STRUCTURES, fail_fast=True)]
Triggers = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STRUCTURES, fail_fast=True)
]


class ResponseFormat(_Fields):
    """OpenAI's. `schema` beside the type is llama.cpp's, `structural_tag` vLLM's and SGLang's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] | None = None
    json_schema: NamedSchema | None = None
    bare_schema: JsonSchema | None = Field(None, alias="schema")
    structures: Structures | None = None
    triggers: Triggers | None = None
    format: dict[str, Any] | None = None  # the current form of a structural tag
    # Where OpenAI's clients have them beside the type; without effect.
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(_Fields):
    """vLLM's: one of these, and how JSON may look."""

    json_schema: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: JsonSchema | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructuredBody(BaseModel):
    """The fields of a request that say what its output must be."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older ones
    guided_json: JsonSchema | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: JsonSchema | None = None
    # SGLang's and llama.cpp's
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
