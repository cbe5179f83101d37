"""Tensors of a checkpoint for each parameter: by transformers' own table of published names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from surestep_common.errors import InvalidRequest
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

_NUMBER = re.compile(r"\d+")
# Of a model that has other parts beside its text.
_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?!lm_head\.)")
_TEXT_HEAD = re.compile(r"(?:model\.)?language_model\.(?=lm_head\.)")
OTHER_PARTS = r"(?!(?:model\.)?language_model\.|lm_head\.).*"  # tensors of these


class Stored(NamedTuple):
    """Tensors that a parameter is made of."""

    # Stacked along the first dimension, in this order; of all experts, if these are apart.
    names: tuple[str, ...]
    by_expert: bool = False  # `names` are those of the first expert's, the second's ...


class CheckpointNames:
    """Names of a checkpoint, by the parameters of a model of transformers."""

    def __init__(self, model: Any, names: Iterable[str], *, of_text: bool = False) -> None:
        """`of_text`: the checkpoint has other parts, and names of its text begin otherwise."""
        transforms = get_model_conversion_mapping(model, add_legacy=True)
        renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._known = model.state_dict()
        patterns = (
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            *(re.escape(name) for name in getattr(model, "_tied_weights_keys", None) or ()),
        )
        self._ignored = re.compile("|".join(patterns) or "(?!)")
        self._parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        self._begins = ""  # names of the text, if not as those of the model
        for name in names:
            known = name
            if of_text:
                begins = _TEXT.match(name)
                self._begins = begins[0] if begins else self._begins
                known = _TEXT_HEAD.sub("", _TEXT.sub("model.", name, count=1))
            target, pattern = rename_source_key(
                known, renamings, self._converters, model.base_model_prefix, self._known
            )
            self._parts[target].append((name, pattern))

    def of(self, parameter: str) -> Stored:
        """Return where a parameter is stored; under its own name where the checkpoint has none.

        Raises InvalidRequest for a form that is not served.
        """
        parts = self._parts.get(parameter)
        if parts is None:
            begins = self._begins or "model."
            return Stored((re.sub(r"^model\.", begins, parameter),))
        patterns = {pattern for _, pattern in parts}
        if patterns == {None}:
            return Stored(tuple(name for name, _ in parts))
        converter = next(c for c in self._converters if patterns <= set(c.source_patterns))
        operations: list[Any] = converter.operations
        kinds = [type(op) for op in operations]
        if kinds not in ([MergeModulelist], [MergeModulelist, Concatenate]) or any(
            op.dim != at for at, op in enumerate(operations)
        ):
            raise InvalidRequest(
                f"{parameter} is stored in a form that is not served: "
                + ", ".join(kind.__name__ for kind in kinds),
                param="model",
            )
        order = converter.source_patterns.index
        ordered = sorted(parts, key=lambda part: (_number(part[0]), order(part[1] or "")))
        return Stored(tuple(name for name, _ in ordered), by_expert=True)

    def ignored(self) -> tuple[str, ...]:
        """Return regular expressions of tensors that hold nothing for the model."""
        unused = (
            name
            for target, parts in self._parts.items()
            for name, _ in parts
            if self._ignored.search(target)
        )
        return tuple(map(re.escape, unused))


def _number(name: str) -> tuple[int, ...]:
    """Return the numbers in a name: of a layer, of an expert."""
    return tuple(map(int, _NUMBER.findall(name)))
