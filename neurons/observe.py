"""What each role shows to a monitor: health and metrics on a port of this machine (`node.metrics_port`)."""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from neurons.settings import NodeConfig
from subnet.adapters.chain import BittensorChain
from subnet.adapters.http_server import mount_status
from subnet.adapters.listener import Listener
from subnet.adapters.metrics import Measure, ReadMeasures, renderer
from subnet.adapters.peers import PeerCounters
from subnet.dashboard.views import RunView
from subnet.types import Phase

if TYPE_CHECKING:  # they bring torch, which the orchestrator does without
    from neurons.roles.miner import Miner
    from neurons.roles.validator import Validator

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def observed(
    config: NodeConfig, *, role: str, health: Callable[[], Mapping[str, object]], measures: ReadMeasures
) -> AsyncIterator[None]:
    """Offer `/health` and `/metrics` while the role runs, when a port for them is configured."""
    if not config.node.metrics_port:
        yield
        return
    listener = Listener()
    mount_status(listener, health=health, metrics=renderer(role, version("strata"), measures))
    await listener.start(HOST, config.node.metrics_port)
    try:
        yield
    finally:
        await listener.stop()


def run_measures(view: RunView) -> Iterator[Measure]:
    """The run as the orchestrator sees it."""
    yield Measure(name="strata_epoch", text="Epoch being worked on.", value=view.epoch)
    for phase in Phase:
        yield Measure(
            name="strata_phase",
            text="1 for the phase the epoch is in.",
            value=float(phase is view.phase),
            labels={"phase": phase.value},
        )
    for stage in view.stages:
        labels = {"stage": str(stage.stage)}
        yield Measure(name="strata_miners", text="Live miners.", value=stage.num_live, labels=labels)
    yield Measure(name="strata_open_samples", text="Samples leased and not settled.", value=view.num_open_samples)
    yield Measure(name="strata_ledger_entries", text="Facts on record.", value=view.num_ledger_entries)
    yield Measure(name="strata_ledger_segments", text="Sealed segments.", value=view.sealed_segments)
    if view.recent_loss is not None:
        yield Measure(name="strata_loss_nats", text="Mean loss of recent samples, per token.", value=view.recent_loss)
    heldout = [evaluation.loss for evaluation in view.evaluations if evaluation.loss is not None]
    if heldout:
        yield Measure(name="strata_heldout_loss_nats", text="Newest held-out loss per token.", value=heldout[-1])
    for miner in view.miners:
        yield Measure(
            name="strata_credited_units",
            text="Backward passes credited in this epoch.",
            value=miner.units,
            labels={"hotkey": miner.hotkey, "stage": str(miner.stage)},
        )


def frame_measures(counters: PeerCounters) -> Iterator[Measure]:
    """What a miner sent and took."""
    sizes = {
        ("sent", "payload"): counters.payload_bytes_sent,
        ("sent", "head"): counters.head_bytes_sent,
        ("received", "payload"): counters.payload_bytes_received,
        ("received", "head"): counters.head_bytes_received,
    }
    for (way, part), value in sizes.items():
        yield Measure(
            name="strata_frame_bytes",
            text="Bytes of frames taken; payloads apart from heads.",
            value=value,
            labels={"way": way, "part": part},
            is_total=True,
        )
    outcomes = {
        "sent": counters.frames_sent,
        "received": counters.frames_received,
        "repeated": counters.frames_repeated,
        "refused": counters.frames_refused,
    }
    for outcome, value in outcomes.items():
        yield Measure(
            name="strata_frames",
            text="Frames by what became of them.",
            value=value,
            labels={"outcome": outcome},
            is_total=True,
        )


def miner_measures(miner: "Miner") -> Iterator[Measure]:
    """A miner's own work."""
    yield Measure(
        name="strata_samples_in_flight", text="Samples between forward and backward.", value=miner.num_open_samples
    )
    yield Measure(name="strata_batches", text="Backward passes done in this epoch.", value=miner.num_batches)
    detoured = miner.detoured
    sent = ("sent", detoured.frames_sent, detoured.payload_bytes_sent)
    received = ("received", detoured.frames_received, detoured.payload_bytes_received)
    for way, num_frames, size_bytes in (sent, received):
        labels = {"way": way}
        text = "Frames through the blob store, for they could not be pushed."
        yield Measure(name="strata_detoured_frames", text=text, value=num_frames, labels=labels, is_total=True)
        text = "Payload bytes of those frames."
        yield Measure(name="strata_detoured_bytes", text=text, value=size_bytes, labels=labels, is_total=True)


def validator_measures(validator: "Validator") -> Iterator[Measure]:
    """A validator's audits and scores."""
    for outcome, count in validator.num_verdicts.items():
        yield Measure(
            name="strata_verdicts", text="Verdicts signed.", value=count, labels={"outcome": outcome}, is_total=True
        )
    yield Measure(name="strata_segments_scored", text="Ledger segments scored.", value=validator.num_scored)
    yield Measure(name="strata_open_audits", text="Challenges to judge.", value=validator.num_open_audits)


def weights_health(chain: BittensorChain) -> dict[str, object]:
    """Whether a validator's weights are on chain; if not, why and what to do."""
    alert = chain.weights_alert
    found: dict[str, object] = {"weights_at_block": chain.last_weights_block}
    return found if alert is None else found | {"weights_alert": f"{alert.reason}; {alert.remedy}"}


def weights_measures(chain: BittensorChain) -> Iterator[Measure]:
    """What became of a validator's weights."""
    alert = chain.weights_alert
    labels = {"code": "" if alert is None else alert.code}
    text = "1 while weights cannot be set, with the reason's name."
    yield Measure(name="strata_weights_alert", text=text, value=float(alert is not None), labels=labels)
    yield Measure(
        name="strata_weights_failed", text="Attempts that failed.", value=chain.num_weights_failed, is_total=True
    )
    if chain.last_weights_block is not None:
        yield Measure(name="strata_weights_block", text="Block of the newest weights.", value=chain.last_weights_block)
