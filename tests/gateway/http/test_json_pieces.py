from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from surestep_gateway.http.bodies import GrowingLists, RawJson, json_pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(content=VALUES, raw=st.lists(VALUES, max_size=3))
def test_pieces_make_up_the_whole(content: Any, raw: list[Any]) -> None:
    values = {"content": content, "raw": [RawJson(orjson.dumps(one)) for one in raw]}
    pieces = json_pieces(values)
    assert len(pieces) == 2 * len(raw) + 1
    assert json.loads(b"".join(pieces)) == {"content": content, "raw": raw}


@given(
    parts=st.lists(
        st.fixed_dictionaries(
            {"a": st.lists(VALUES, max_size=3), "b": st.lists(VALUES, max_size=2)}
        )
    )
)
def test_lists_that_grow(parts: list[dict[str, list[Any]]]) -> None:
    lists = GrowingLists()
    for part in [{"a": [], "b": []}, *parts]:
        lists.extend(part)
    assert lists.num_bytes >= sum(len(part["a"]) + len(part["b"]) for part in parts)
    made = {name: json.loads(raw.data) for name, raw in lists.finish().items()}
    assert made == {name: [one for part in parts for one in part[name]] for name in ("a", "b")}
