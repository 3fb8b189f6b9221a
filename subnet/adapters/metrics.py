"""Prometheus metrics of each role: few, with their units in their names, all beginning with `strata_`."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from subnet import wire
from subnet.adapters.peers import PeerCounters
from subnet.types import Outcome, Phase

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def new_registry(role: str, version: str) -> CollectorRegistry:
    """Registry of one process, with its memory, processor time and build."""
    registry = CollectorRegistry()
    ProcessCollector(namespace="strata", registry=registry)
    build = Gauge(
        "strata_build", "Role and software of this process.", ("role", "version", "protocol"), registry=registry
    )
    build.labels(role, version, str(wire.PROTOCOL_VERSION)).set(1)
    return registry


def renderer(registry: CollectorRegistry) -> Callable[[], bytes]:
    """What `/metrics` answers (http_server.mount_status)."""
    return lambda: generate_latest(registry)


class OrchestratorMetrics:
    """The run as the orchestrator sees it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.epoch = Gauge("strata_epoch", "Epoch that is open now.", registry=registry)
        self._phase = Gauge("strata_phase", "1 for the phase the epoch is in.", ("phase",), registry=registry)
        self.miners = Gauge("strata_miners", "Miners that hold a stage.", ("stage",), registry=registry)
        self.open_samples = Gauge("strata_open_samples", "Samples leased and not completed.", registry=registry)
        self.receipts = Counter("strata_receipts", "Receipts recorded.", registry=registry)
        self.units = Counter("strata_credited_units", "Completed backward passes credited.", registry=registry)
        self.refusals = Counter("strata_refusals", "Requests answered with a refusal.", ("code",), registry=registry)
        self.heldout_loss = Gauge("strata_heldout_loss_nats", "Newest held-out loss per token.", registry=registry)
        self.request_seconds = Histogram(
            "strata_request_seconds", "Time to answer.", ("message",), buckets=_SECONDS, registry=registry
        )
        self.journal_seconds = Histogram(
            "strata_journal_append_seconds", "Time until an append is flushed.", buckets=_SECONDS, registry=registry
        )

    def set_phase(self, phase: Phase) -> None:
        """Show `phase` as the one the epoch is in."""
        for each in Phase:
            self._phase.labels(each.value).set(each is phase)


class MinerMetrics:
    """The work of one miner, and what it sent and took."""

    def __init__(self, registry: CollectorRegistry, counters: PeerCounters) -> None:
        self.passes = Counter("strata_passes", "Passes computed.", ("direction",), registry=registry)
        self.inner_steps = Counter("strata_inner_steps", "Inner steps taken.", registry=registry)
        self.dropped_samples = Counter("strata_dropped_samples", "Samples given up.", registry=registry)
        self.in_flight = Gauge("strata_samples_in_flight", "Samples between forward and backward.", registry=registry)
        self.loss = Gauge("strata_loss_nats", "Loss of the newest sample (last stage only).", registry=registry)
        self.compute_seconds = Counter(
            "strata_compute_seconds", "Time spent computing.", ("direction",), registry=registry
        )
        registry.register(_PeerCollector(counters))


class ValidatorMetrics:
    """Audits and weights of one validator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.verdicts = Counter("strata_verdicts", "Verdicts signed.", ("outcome",), registry=registry)
        self.replay_seconds = Histogram(
            "strata_replay_seconds", "Time to replay one segment.", buckets=_SECONDS, registry=registry
        )
        self.weights_at_block = Gauge(
            "strata_weights_at_block", "Block that includes our newest weights.", registry=registry
        )
        self.weight_failures = Counter(
            "strata_weight_failures", "Attempts to set weights that failed.", registry=registry
        )
        for outcome in Outcome:
            self.verdicts.labels(outcome.value)


class _PeerCollector(Collector):
    """Reads the counters of peers.HttpPeers when asked, so that sending costs nothing."""

    def __init__(self, counters: PeerCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        counters = self._counters
        yield _family(
            "strata_frame_bytes",
            "Bytes of frames taken; payloads apart from heads.",
            {
                ("sent", "payload"): counters.payload_bytes_sent,
                ("sent", "head"): counters.head_bytes_sent,
                ("received", "payload"): counters.payload_bytes_received,
                ("received", "head"): counters.head_bytes_received,
            },
            labels=("way", "part"),
        )
        yield _family(
            "strata_frames",
            "Frames by what became of them.",
            {
                ("sent",): counters.frames_sent,
                ("received",): counters.frames_received,
                ("repeated",): counters.frames_repeated,
                ("refused",): counters.frames_refused,
            },
            labels=("outcome",),
        )


def _family(
    name: str, text: str, values: Mapping[tuple[str, ...], int], *, labels: tuple[str, ...]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
