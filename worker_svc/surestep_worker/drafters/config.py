"""`--speculative-config`: a JSON object with vLLM's key names."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from surestep_common.errors import InvalidRequest

from .detect import filled_in
from .registry import ALIASES, DRAFTERS, HEADS_APART

_MISSING = {
    "method": "one of {}, or a draft model as `model`, whose config.json says it".format(
        ", ".join(DRAFTERS.names())
    ),
    "num_speculative_tokens": "the most tokens that are drafted in a step, such as 4",
}


def _known_method(name: str) -> str:
    name = ALIASES.get(name, name)
    try:
        DRAFTERS.get(name)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return name


class SpeculativeConfig(BaseModel):
    """Settings of drafting.

    `prompt_lookup_*` belong to the method `ngram`, and to a head that is to draft only where
    nothing is found; `model` to `eagle3` and `draft_model`, the layers to `eagle3`, the temperature
    to all that draft with a head or a model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Annotated[str, AfterValidator(_known_method)]
    num_speculative_tokens: int = Field(ge=0, le=16)  # drafts per step at most; 0 = off
    prompt_lookup_max: int = Field(default=5, ge=1, le=64)  # longest n-gram looked up, tokens
    prompt_lookup_min: int = Field(default=2, ge=1)  # shortest that counts as a match, tokens

    model: str | None = Field(default=None, min_length=1)  # folder of what drafts
    # After how many of the model's layers the head reads its hidden states; none = as it says.
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None

    # Of the drafter's draws, as a factor of the request's temperature; none = fitted as it runs.
    draft_temperature: float | None = Field(default=None, gt=0, le=10)

    @model_validator(mode="before")
    @classmethod
    def _as_the_model_says(cls, given: Any) -> Any:
        return filled_in(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        if self.method in HEADS_APART and self.model is None:
            raise ValueError(f"method {self.method} needs the draft model's folder as model")
        if self.method != "eagle3" and self.eagle_aux_hidden_state_layer_ids is not None:
            raise ValueError("eagle_aux_hidden_state_layer_ids belong to the method eagle3")
        return self

    @property
    def looks_up(self) -> bool:
        """Return whether a text that repeats itself is looked up before a head is asked."""
        return not self.model_fields_set.isdisjoint(("prompt_lookup_max", "prompt_lookup_min"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the flag's value. Raises InvalidRequest with one line that names every mistake."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            found = error.errors()
            known = f" (known keys: {', '.join(cls.model_fields)})"
            raise InvalidRequest(
                f"speculative config: {'; '.join(map(_describe, found))}"
                f"{known if any(item['type'] == 'extra_forbidden' for item in found) else ''}",
                param="speculative_config",
            ) from error


def _describe(details: ErrorDetails) -> str:
    where = ".".join(str(part) for part in details["loc"])
    if details["type"] == "missing":
        return f"{where} is missing: {_MISSING[where]}"
    message = details["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
