"""Exports metrics as Ray metrics: Ray dashboard, Prometheus, Grafana.

Construct it inside the actor that records (the controller): Ray ties metrics to their worker process.
"""

from collections.abc import Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.metrics import Metric, samples

PREFIX = "springtide_"


class RaySink:
    """A ``MetricSink``; each series is made when its first number arrives.

    ``tags`` (say ``{"run": "frozenlake"}``) are put on every series.
    """

    def __init__(self, tags: Mapping[str, str] | None = None) -> None:
        self._tags = dict(tags or {})
        self._series: dict[str, Any] = {}

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Set gauges, add to counters, observe histograms. Raises ValueError for unknown names."""
        for metric, tags, value in samples(values):
            series = self._series.get(metric.name)
            if series is None:
                series = self._series[metric.name] = self._make(metric)
            tags = {**self._tags, **tags}
            if metric.kind == "gauge":
                series.set(value, tags)
            elif metric.kind == "histogram":
                series.observe(value, tags)
            elif value > 0:  # Ray refuses increments of 0, which change nothing anyway
                series.inc(value, tags)

    def close(self) -> None:
        """Series end with their process; forget them."""
        self._series.clear()

    def _make(self, metric: Metric) -> Any:
        name = PREFIX + metric.name
        text = f"{metric.help} [{metric.unit}]"
        keys = (*self._tags, *metric.tags)
        if metric.kind == "counter":
            return Counter(name, text, tag_keys=keys)
        if metric.kind == "histogram":
            return Histogram(name, text, boundaries=list(metric.boundaries), tag_keys=keys)
        return Gauge(name, text, tag_keys=keys)
