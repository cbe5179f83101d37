"""Repetition is found at the token at which vLLM's definition first holds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from surestep_gateway.generation.detokenize import RepetitionDetector


def repeats(ids: list[int], least: int, most: int, count: int) -> bool:
    """The definition: a pattern of such a size stands `count` times at the end."""
    return any(
        len(ids) >= size * count and ids[-size:] * count == ids[-size * count :]
        for size in range(max(least, 1), most + 1)
    )


@given(
    ids=st.lists(st.integers(0, 2), max_size=60),
    sizes=st.tuples(st.integers(0, 6), st.integers(1, 6)).map(sorted),
    count=st.integers(2, 5),
    min_tokens=st.integers(0, 20),
)
def test_found_where_it_first_holds(
    ids: list[int], sizes: list[int], count: int, min_tokens: int
) -> None:
    least, most = sizes
    detector = RepetitionDetector(least, most, count, min_tokens=min_tokens)
    found = [detector.push(id_) for id_ in ids]
    ends = range(1, len(ids) + 1)
    assert found == [end > min_tokens and repeats(ids[:end], least, most, count) for end in ends]
