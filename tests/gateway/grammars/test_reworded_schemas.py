"""Schemas in other words: the same documents, more of them, or those whose keys are named."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from surestep_gateway.grammars.closing import closed
from surestep_gateway.grammars.widening import reworded, widened, without_lengths

KEYS = st.sampled_from(["a", "b", "ab", "properties", "enum"])
PATTERNS = st.sampled_from(
    [
        *(r"^a", r"\Aa\Z", r"b\Z", r"^(?!a)", r"^(?=a|b).b$", r"(?<!a)b$", r"^(a|b)\1?$"),
        *(r"^(?!(?:a|\)|[)])b)[ab]+$", r"^[(?=]a", r"\((?=b)", "a(?!b)|b"),
    ]
)
TEXTS = st.sampled_from(["", "a", "b", "ab", "ba", "aa", "a)", "(b", "?a"])
NAMES = st.one_of(
    st.builds(lambda values: {"enum": values}, st.lists(KEYS, min_size=1, max_size=3)),
    st.builds(lambda name: {"const": name}, KEYS),
    st.builds(lambda pattern: {"pattern": pattern}, PATTERNS),
    st.builds(
        lambda low, more: {"minLength": low, "maxLength": low + more},
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    st.just({"type": "string"}),
    st.just({"$ref": "#/$defs/K"}),
)
LEAVES = st.one_of(
    st.sampled_from(
        [
            *({}, {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": ["a", 1]}),
            *(
                {"not": {}},
                {"not": {"type": "integer"}},
                {"$ref": "#/$defs/A"},
                {"$ref": "#/$defs/L"},
            ),
            *({"type": "string", "format": "color"}, {"type": "object"}, {"required": ["b"]}),
        ]
    ),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 2}, PATTERNS),
)


def larger(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.lists(part, min_size=1, max_size=3)
    words: dict[str, st.SearchStrategy[Any]] = {
        "type": st.just("object"),
        "properties": st.dictionaries(KEYS, part, max_size=3),
        "required": st.lists(KEYS, max_size=2, unique=True),
        "patternProperties": st.dictionaries(PATTERNS, part, max_size=2),
        "additionalProperties": st.one_of(part, st.booleans()),
        "propertyNames": NAMES,
        "dependentRequired": st.dictionaries(
            KEYS, st.lists(KEYS, max_size=2, unique=True), max_size=2
        ),
        "dependentSchemas": st.dictionaries(KEYS, part, max_size=1),
        "minProperties": st.integers(0, 2),
        "maxProperties": st.integers(0, 2),
        "allOf": parts,
        "anyOf": parts,
        "oneOf": parts,
        "not": part,
        "if": part,
        "then": part,
        "else": part,
        "$ref": st.sampled_from(["#/$defs/A", "#/$defs/L"]),
    }
    objects = st.fixed_dictionaries({}, optional=words).map(
        lambda found: dict(list(found.items())[:5])
    )
    some = st.lists(st.sampled_from(sorted(words)), min_size=1, max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: words[name] for name in names})
    )
    lists = st.fixed_dictionaries(
        {"items": part}, optional={"uniqueItems": st.just(True), "maxItems": st.integers(0, 3)}
    )
    return st.one_of(some, some, objects, lists)


DEFINITIONS = {
    "A": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "L": {"type": "object", "properties": {"b": {"$ref": "#/$defs/L"}}},
    "K": {"enum": ["a", "b"]},
}
SCHEMAS = st.recursive(LEAVES, larger, max_leaves=6).map(lambda one: one | {"$defs": DEFINITIONS})
DOCUMENTS = st.recursive(
    st.one_of(st.integers(0, 2), TEXTS, st.none()),
    lambda one: st.one_of(
        st.lists(one, max_size=3), st.dictionaries(KEYS | TEXTS, one, max_size=3)
    ),
    max_leaves=5,
)


def allows(schema: Any, document: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(document))


@settings(max_examples=400, deadline=None)
@given(SCHEMAS, st.lists(DOCUMENTS, min_size=3, max_size=8))
def test_other_words(schema: dict[str, Any], documents: list[Any]) -> None:
    same, shut = reworded(schema), closed(reworded(schema))
    wide, shut_and_wide = (without_lengths(widened(one)) for one in (same, shut))
    monotonous = not any(f"'{word}'" in str(schema) for word in ("oneOf", "not", "if"))
    for document in documents:
        allowed, is_named = allows(schema, document), allows(shut, document)
        assert allows(same, document) is allowed
        assert allows(wide, document) or not allowed
        assert allows(shut_and_wide, document) or not is_named
        assert allowed or not is_named or not monotonous
