"""Where layers lie in the blocks of the KV cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from surestep_common.kv_groups import ALL
from surestep_worker.cache.kv_cache import KVLayout, Place

WINDOWS = st.lists(st.sampled_from([ALL, ALL, 128, 128, 512]), min_size=1, max_size=48)


@given(windows=WINDOWS, drafting=st.integers(0, 3), keeps_hidden=st.booleans())
def test_every_layer_has_a_place_of_its_own_among_its_like(
    windows: list[int], drafting: int, keeps_hidden: bool
) -> None:
    layout = KVLayout.of(windows, drafting, keeps_hidden=keeps_hidden)
    assert len(layout.places) == len(set(layout.places)) == len(windows) + drafting
    needs_all = (drafting > 0 or keeps_hidden) and ALL not in windows
    for window, place in zip(windows, layout.places, strict=False):
        assert layout.windows[place.group] == (ALL if needs_all else window)
        assert 0 <= place.layer < layout.num_layers
    drafts = layout.places[len(windows) :]
    assert drafts == tuple(Place(0, layout.num_layers + i) for i in range(drafting))
    if drafting or keeps_hidden:
        assert layout.windows[0] == ALL
    assert list(layout.windows) == sorted(layout.windows)
    assert {place.group for place in layout.places} == set(range(len(layout.windows)))


@given(windows=WINDOWS)
def test_little_of_a_block_is_left_empty(windows: list[int]) -> None:
    """All groups together have room for half as many layers again as there are, at most, but for
    a layer each."""
    layout = KVLayout.of(windows, 0, keeps_hidden=False)
    assert layout.num_layers * len(layout.windows) <= 1.5 * len(windows) + len(layout.windows)


def test_layers_without_windows_are_one_group() -> None:
    assert KVLayout.of([ALL] * 3, 1, keeps_hidden=True) == (
        (ALL,),
        (Place(0, 0), Place(0, 1), Place(0, 2), Place(0, 3)),
        3,
    )
    assert KVLayout.of([], 0, keeps_hidden=False).windows == (ALL,)  # recurrent layers alone


def test_gpt_oss_has_two_groups_of_the_same_size() -> None:
    layout = KVLayout.of([128, ALL] * 18, 0, keeps_hidden=False)
    assert (layout.windows, layout.num_layers) == ((ALL, 128), 18)
    assert layout.places[:4] == (Place(1, 0), Place(0, 0), Place(1, 1), Place(0, 1))


def test_a_kind_with_more_layers_has_more_groups() -> None:
    """Five layers with a window to each without: blocks as large as the fewest layers need."""
    layout = KVLayout.of(([1024] * 5 + [ALL]) * 5, 0, keeps_hidden=False)
    assert (layout.windows, layout.num_layers) == ((ALL, *[1024] * 5), 5)


def test_a_model_of_windows_alone_keeps_all_for_a_draft_head() -> None:
    assert KVLayout.of([4096] * 4, 0, keeps_hidden=False).windows == (4096,)
    assert KVLayout.of([4096] * 4, 1, keeps_hidden=True).windows == (ALL,)
