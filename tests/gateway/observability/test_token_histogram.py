"""The histogram that is observed with every token says what the library's says."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from surestep_gateway.observability.clients import TokenHistogram

BOUNDS = (0.001, 0.0025, 0.5, 1.0, 80.0)
LABELS = {"model_name": "m", "engine": "0"}
VALUES = st.floats(0, 100) | st.sampled_from(BOUNDS)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    """What a scrape of a registry tells, but for the time at which its histogram was made."""
    found = {}
    for family in registry.collect():
        assert (family.name, family.type) == ("gaps_seconds", "histogram")
        for sample in family.samples:
            bound = sample.labels.pop("le", None)
            assert sample.labels == LABELS
            found[sample.name, bound] = sample.value
    return {name: value for name, value in found.items() if name[0] != "gaps_seconds_created"}


@given(st.lists(VALUES, max_size=20))
def test_it_says_what_the_library_says(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    family = TokenHistogram("gaps_seconds", "Gaps.", tuple(LABELS), BOUNDS)
    ours.register(family)
    quick = family.labels(*LABELS.values())
    known = Histogram("gaps_seconds", "Gaps.", tuple(LABELS), buckets=BOUNDS, registry=theirs)
    child = known.labels(*LABELS.values())
    for value in values:
        quick.observe(value)
        child.observe(value)
    assert samples(ours) == samples(theirs)
    assert family.counts() == quick.counts()
