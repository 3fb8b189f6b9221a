"""Everything the report of a local subnet is made from, and the rows that follow from it."""

from dataclasses import dataclass, field

import msgspec

from incentives.weights import to_u16
from neurons.checks import Finding, History
from neurons.local.notes import Counters, Repeated, Trained
from neurons.local.plan import Part
from neurons.settings import NodeConfig
from subnet import wire
from subnet.config import RunKind
from subnet.orchestration.ledger import Evaluated
from subnet.types import Epoch, Hotkey, Metagraph, Outcome, Record, StageIndex, Uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The sealed record, the chain as it stands at the end, and what the processes left."""

    config: NodeConfig
    parts: dict[Hotkey, Part]
    history: History
    whole: Finding
    discovery: wire.Discovery | None
    metagraph: Metagraph
    weights: dict[Hotkey, dict[Uid, int]]
    counters: dict[str, Counters] = field(default_factory=dict)
    unigram: float | None = None
    reference: Trained | None = None
    repeated: tuple[Repeated, ...] = ()
    restarts: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> dict[Hotkey, str]:
        """Names of the processes by their hotkey."""
        return {hotkey: part.name for hotkey, part in self.parts.items()}

    @property
    def miners(self) -> dict[Hotkey, Part]:
        """Miners in order of their number."""
        return {hotkey: part for hotkey, part in self.parts.items() if part.role == "miner"}

    @property
    def evaluations(self) -> list[Evaluated]:
        """Held-out losses, oldest epoch first."""
        accounts = self.history.record.accounts
        return [account.evaluation for _, account in sorted(accounts.epochs.items()) if account.evaluation is not None]


class LossRow(Record, frozen=True):
    """Held-out loss of one published epoch, nats per token; `share` of the unigram entropy."""

    epoch: Epoch
    loss: float
    loss_wires_zeroed: float
    share: float | None


class RoundRow(Record, frozen=True):
    """One round of one stage that trains apart: mean local loss of its samples, and whose updates it took up."""

    epoch: Epoch
    stage: StageIndex
    loss: float | None
    assigned: int
    accepted: int
    late: int


class MinerRow(Record, frozen=True):
    """What one hotkey did, what was found about it, and what it got. `reason` says why when that is nothing."""

    name: str
    hotkey: Hotkey
    cheat: str
    stage: StageIndex | None
    units: int
    audits_passed: int
    audits_failed: int
    audits_open: int
    score: float
    weight: float
    earned_alpha: float
    restarts: int
    reason: str


class ValidatorRow(Record, frozen=True):
    """The u16 weights that one validator has on chain, by miner, as the SDK reads them back."""

    name: str
    hotkey: Hotkey
    on_chain: dict[str, int]
    expected: dict[str, int]
    earned_alpha: float


class PlaneBytes(Record, frozen=True):
    """Bytes that all miners sent to each other, and in merges the largest ratio of one miner over 4W + 2W/N.

    A payload that took the detour through the blob store is counted once, and once more apart.
    """

    activation_payload: int
    gradient_payload: int
    frame_heads: int
    passes: int
    detoured: int
    detoured_payload: int
    full_width_fp32: int
    merge_payload: int
    worst_merge_ratio: float | None


class CheatRow(Record, frozen=True):
    """What became of a miner that cheats. `published_rule_passes` is what the paper's cosine rule said of the same segment."""

    name: str
    kind: str
    convicted_in_epoch: Epoch | None
    reason: str
    published_rule_passes: bool | None
    cosine: float | None
    rel_d: float | None
    score_zero_after_epochs: int | None


def loss_rows(evidence: Evidence) -> tuple[LossRow, ...]:
    """One row for each evaluated epoch."""
    return tuple(
        LossRow(
            epoch=found.epoch,
            loss=found.loss,
            loss_wires_zeroed=found.loss_wires_zeroed,
            share=found.loss / evidence.unigram if evidence.unigram else None,
        )
        for found in evidence.evaluations
    )


def miner_rows(evidence: Evidence) -> tuple[MinerRow, ...]:
    """One row for each miner, in order of its number."""
    return tuple(_miner_row(evidence, hotkey, part) for hotkey, part in evidence.miners.items())


def _miner_row(evidence: Evidence, hotkey: Hotkey, part: Part) -> MinerRow:
    accounts = evidence.history.record.accounts.epochs.values()
    score = evidence.history.final_scores().get(hotkey)
    weight = evidence.history.final_weights().get(hotkey, 0.0)
    neuron = evidence.metagraph.by_hotkey().get(hotkey)
    earned = neuron.stake if neuron else 0.0
    outcomes = [account.outcomes[hotkey] for account in accounts if hotkey in account.outcomes]
    stages = [account.stage_of[hotkey] for account in accounts if hotkey in account.stage_of]
    reason = score.reason if score else "it never worked in a published epoch"
    if not reason and earned == 0.0:
        reason = "it has a weight, but no epoch of the chain has paid by it yet"
    return MinerRow(
        name=part.name,
        hotkey=hotkey,
        cheat=part.cheat,
        stage=stages[-1] if stages else None,
        units=sum(len(account.units.get(hotkey, {})) for account in accounts),
        audits_passed=outcomes.count(Outcome.PASS),
        audits_failed=outcomes.count(Outcome.FAIL),
        audits_open=outcomes.count(Outcome.INCONCLUSIVE),
        score=score.score if score else 0.0,
        weight=weight,
        earned_alpha=earned,
        restarts=evidence.restarts.get(part.name, 0),
        reason=reason,
    )


def validator_rows(evidence: Evidence) -> tuple[ValidatorRow, ...]:
    """One row for each validator: what it has on chain beside what the record yields."""
    names = evidence.names
    neurons = evidence.metagraph.by_hotkey()
    of_uid = {neuron.uid: names.get(neuron.hotkey, neuron.hotkey) for neuron in evidence.metagraph.neurons}
    expected = {names.get(hotkey, hotkey): value for hotkey, value in to_u16(evidence.history.final_weights()).items()}
    return tuple(
        ValidatorRow(
            name=part.name,
            hotkey=hotkey,
            on_chain={of_uid.get(uid, str(uid)): value for uid, value in evidence.weights.get(hotkey, {}).items()},
            expected=expected,
            earned_alpha=neurons[hotkey].stake if hotkey in neurons else 0.0,
        )
        for hotkey, part in evidence.parts.items()
        if part.role == "validator"
    )


def plane_bytes(evidence: Evidence) -> PlaneBytes:
    """Sums over all miners that left counters."""
    counters = list(evidence.counters.values())
    run = evidence.config.run
    num_values = run.training.microbatch_size * run.training.num_tokens * run.model.width
    passes = sum(count.passes_sent for count in counters)
    ratios = [merge.ratio for count in counters for merge in count.merges if merge.num_miners > 1 and merge.received]
    return PlaneBytes(
        activation_payload=sum(count.activation_payload_bytes_sent for count in counters),
        gradient_payload=sum(count.gradient_payload_bytes_sent for count in counters),
        frame_heads=sum(count.frame_head_bytes_sent for count in counters),
        passes=passes,
        detoured=sum(count.frames_detoured for count in counters),
        detoured_payload=sum(count.detoured_payload_bytes_sent for count in counters),
        full_width_fp32=4 * num_values * passes,
        merge_payload=sum(merge.sent + merge.received for count in counters for merge in count.merges),
        worst_merge_ratio=max(ratios, default=None),
    )


def cheat_rows(evidence: Evidence) -> tuple[CheatRow, ...]:
    """One row for each miner that was told to cheat."""
    return tuple(_cheat_row(evidence, hotkey, part) for hotkey, part in evidence.miners.items() if part.cheat)


def _cheat_row(evidence: Evidence, hotkey: Hotkey, part: Part) -> CheatRow:
    accounts = [account for _, account in sorted(evidence.history.record.accounts.epochs.items())]
    convictions = [account for account in accounts if account.outcomes.get(hotkey) is Outcome.FAIL]
    first = next((account.epoch for account in accounts if hotkey in account.stage_of), Epoch(0))
    verdicts = [
        verdict
        for account in convictions[:1]
        for verdict in account.verdicts
        if verdict.hotkey == hotkey and verdict.outcome is Outcome.FAIL
    ]
    measured = next((verdict.measures for verdict in verdicts if verdict.measures is not None), None)
    has_cuts = evidence.config.run.kind is RunKind.PIPELINE  # elsewhere nothing is sent that a cosine could be taken of
    boards = evidence.history.boards
    zero = next(
        (
            index
            for index in range(int(first), len(boards))
            if convictions and boards[index].scores.get(hotkey, 0.0) == 0.0 == boards[index].weights.get(hotkey, 0.0)
        ),
        None,
    )
    return CheatRow(
        name=part.name,
        kind=part.cheat,
        convicted_in_epoch=convictions[0].epoch if convictions else None,
        reason=verdicts[0].reason if verdicts else "",
        published_rule_passes=verdicts[0].published_rule_passes if verdicts and has_cuts else None,
        cosine=measured.cosine if measured and has_cuts else None,
        rel_d=measured.rel_d_max if measured and has_cuts else None,
        score_zero_after_epochs=None if zero is None else zero - int(first),
    )


class Report(Record, frozen=True):
    """How a local subnet ended; report.json."""

    run_id: str
    is_ok: bool
    took_s: float
    losses: tuple[LossRow, ...]
    unigram: float | None
    reference_loss: float | None
    reference_samples: int | None
    miners: tuple[MinerRow, ...]
    validators: tuple[ValidatorRow, ...]
    bytes_by_plane: PlaneBytes
    rounds: tuple[RoundRow, ...]
    cheats: tuple[CheatRow, ...]
    findings: tuple[Finding, ...]


def encode_report(report: Report) -> bytes:
    """JSON for people and scripts."""
    return msgspec.json.format(msgspec.json.encode(report)) + b"\n"
