"""`--pooler-config` and `--hf-overrides`, as far as the gateway reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)


class PoolerConfig(BaseModel):
    """`--pooler-config`, with vLLM's key names. None: the model's folder decides."""

    model_config = ConfigDict(extra="forbid")

    pooling_type: Literal["LAST", "MEAN"] | None = Field(
        None, validation_alias=AliasChoices("pooling_type", "seq_pooling_type")
    )
    normalize: bool | None = Field(
        None, validation_alias=AliasChoices("normalize", "use_activation")
    )
    dimensions: PositiveInt | None = None  # of vectors whose request names none


class HfOverrides(BaseModel):
    """`--hf-overrides`: values that replace those of config.json. The others are the workers'."""

    is_matryoshka: bool | None = None
    matryoshka_dimensions: list[PositiveInt] | None = None
    # The model judges whether a document meets a query, by its logits of these tokens: no and yes,
    # or yes alone. The others say so too, in vLLM's words.
    classifier_from_token: Annotated[list[str], Field(min_length=1, max_length=2)] | None = None
    method: Literal["from_2_way_softmax", "no_post_processing"] | None = None
    is_original_qwen3_reranker: bool | None = None

    @model_validator(mode="after")
    def _one_way_to_a_score(self) -> Self:
        tokens = self.classifier_from_token or ()
        ways = {0: (None,), 1: (None, "no_post_processing"), 2: (None, "from_2_way_softmax")}
        if self.method not in ways[len(tokens)]:
            raise ValueError(f"method {self.method} makes no score of {len(tokens)} tokens")
        if self.is_original_qwen3_reranker and len(tokens) != 2:
            raise ValueError("is_original_qwen3_reranker needs the two of classifier_from_token")
        return self


def check_keys(known: type[BaseModel], given: Mapping[str, Any]) -> None:
    """Raise ValueError that names each wrong key and its problem."""
    try:
        known.model_validate(given)
    except ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, one['loc']))} is not supported"
            if one["type"] == "extra_forbidden"
            else f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
            for one in error.errors()
        ]
        raise ValueError(f"{', '.join(wrong)}; keys are {', '.join(known.model_fields)}") from None
