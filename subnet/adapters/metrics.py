"""Prometheus metrics of one process: read from the role when a scraper asks, so that working costs nothing.

Names begin with `strata_` and end with their unit; totals end with `_total`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from subnet import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One sample of one metric. `is_total`: it only grows while the process lives."""

    name: str
    text: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    is_total: bool = False


ReadMeasures = Callable[[], Iterable[Measure]]


class _Reader(Collector):
    """Groups what `read` gives into metric families."""

    def __init__(self, read: ReadMeasures) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for measure in self._read():
            family = families.get(measure.name)
            if family is None:
                kind = CounterMetricFamily if measure.is_total else GaugeMetricFamily
                family = families[measure.name] = kind(measure.name, measure.text, labels=sorted(measure.labels))
            family.add_metric([measure.labels[key] for key in sorted(measure.labels)], measure.value)
        return families.values()


def renderer(role: str, version: str, read: ReadMeasures) -> Callable[[], bytes]:
    """What `/metrics` answers: the role's measures, with the process's memory and processor time and its build."""
    registry = CollectorRegistry()
    ProcessCollector(namespace="strata", registry=registry)
    build = Gauge(
        "strata_build", "Role and software of this process.", ("role", "version", "protocol"), registry=registry
    )
    build.labels(role, version, str(wire.PROTOCOL_VERSION)).set(1)
    registry.register(_Reader(read))
    return lambda: generate_latest(registry)
