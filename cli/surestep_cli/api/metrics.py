"""The metrics of a running server, parsed from Prometheus text."""

from __future__ import annotations

from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families
from surestep_common.errors import Unavailable


class Metrics:
    """The samples of one scrape. Raise Unavailable when the text is not Prometheus text."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples[sample.name].append((sample.labels, sample.value))
        except ValueError as error:
            raise Unavailable(f"/metrics is no text for Prometheus: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._samples

    def total(self, name: str) -> float:
        """Return the sum over the samples of a name; 0 without any."""
        return sum(value for _, value in self._samples.get(name, ()))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Return the sums by the values of a label."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name, ()):
            sums[labels.get(label, "")] += value
        return dict(sums)
