"""What a run's public record proves by itself and against the chain; the same checks for `strata audit` and for localnet."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from incentives.reward import Score
from incentives.weights import to_u16
from neurons.scoring import Record, scored, weighted
from subnet import receipts, wire
from subnet.config import RunConfig
from subnet.errors import InvariantBroken
from subnet.lanes import lanes
from subnet.orchestration.invariants import check_cases, check_record
from subnet.orchestration.ledger import GENESIS_HEAD, EpochPublished, RootCommitted, ScoresPosted, VerdictRecorded
from subnet.receipts import verdict_bytes
from subnet.types import Digest, Epoch, Hotkey, Metagraph, Uid
from subnet.types import Record as Value

Verify = Callable[[Hotkey, bytes, str], bool]
"""Whether a signature is this hotkey's of these bytes (ports.Signer.verify)."""


class Finding(Value, frozen=True):
    """One thing that was checked. `holds` is None where it says nothing about this run, and `detail` then says why."""

    name: str
    holds: bool | None
    detail: str


@dataclass(slots=True)
class Board:
    """What follows from the record up to the end of one segment."""

    head: Digest
    scores: dict[Hotkey, float]
    weights: dict[Hotkey, float]


@dataclass(slots=True)
class History:
    """A record that was read, and what it came to after each segment."""

    owner: Hotkey
    record: Record = field(default_factory=Record)
    boards: list[Board] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """Check and take the next segment. Raises InvariantBroken naming the first event that does not hold."""
        self.record.add(data)
        scores = {hotkey: score.score for hotkey, score in scored(self.record).items()}
        self.boards.append(Board(self.record.head, scores, weighted(self.record, burn_hotkey=self.owner)))

    def final_scores(self) -> dict[Hotkey, Score]:
        """Scores at the end of the record; empty for an empty one."""
        return scored(self.record) if self.boards else {}

    def final_weights(self) -> dict[Hotkey, float]:
        """Weights at the end of the record; empty for an empty one."""
        return self.boards[-1].weights if self.boards else {}


def read_history(segments: Iterable[bytes], *, owner: Hotkey) -> tuple[History, Finding]:
    """The record as far as it holds, and whether all of it does."""
    history = History(owner)
    name = "the record is whole: every event follows from the one before"
    try:
        for data in segments:
            history.add(data)
    except InvariantBroken as error:
        return history, Finding(name=name, holds=False, detail=str(error))
    record = history.record
    if not record.num_segments:
        return history, Finding(name=name, holds=False, detail="there is no sealed segment")
    return history, Finding(
        name=name, holds=True, detail=f"{len(record.entries)} events in {record.num_segments} segments"
    )


def check_invariants(history: History) -> Finding:
    """One lease, one credit for each unit of work; epochs in order and whole (trust.md 8)."""
    name = "no unit of work is credited twice or without a lease, no epoch is skipped"
    created = history.record.accounts.created
    if created is None:
        return Finding(name=name, holds=False, detail="the record does not begin with the run's creation")
    try:
        config = msgspec.json.decode(created.config_json, type=RunConfig)
        check_record(history.record.entries, lanes(config))
    except InvariantBroken as error:
        return Finding(name=name, holds=False, detail=str(error))
    num_units = sum(
        len(samples) for account in history.record.accounts.epochs.values() for samples in account.units.values()
    )
    return Finding(name=name, holds=True, detail=f"{num_units} units")


def check_verdicts(history: History, verify: Verify) -> Finding:
    """Every verdict in the record is signed by the validator it names."""
    name = "every verdict is signed by its validator"
    count = 0
    for entry in history.record.entries:
        if not isinstance(entry.fact, VerdictRecorded):
            continue
        verdict = entry.fact.verdict
        if not verify(verdict.validator, verdict_bytes(verdict), verdict.signature):
            detail = f"event {entry.seq}: the verdict on {verdict.hotkey} is not signed by {verdict.validator}"
            return Finding(name=name, holds=False, detail=detail)
        count += 1
    return Finding(name=name, holds=True, detail=f"{count} verdicts")


def check_outcomes(history: History) -> Finding:
    """Every audit was closed as its verdicts say: no pass and no ban by the orchestrator's word alone (trust.md 1.5)."""
    name = "every audit was closed as its verdicts and absences say"
    created = history.record.accounts.created
    if created is None:
        return Finding(name=name, holds=False, detail="the record does not begin with the run's creation")
    config = msgspec.json.decode(created.config_json, type=RunConfig)
    try:
        num_closed = check_cases(history.record.entries, config.audit)
    except InvariantBroken as error:
        return Finding(name=name, holds=False, detail=str(error))
    return Finding(name=name, holds=True, detail=f"{num_closed} audits")


def check_commit_roots(history: History) -> Finding:
    """Each epoch's root that went on chain covers exactly the commitments in the record."""
    name = "each epoch's commit root covers the recorded commitments"
    count = 0
    for account in history.record.accounts.epochs.values():
        if account.root is None:
            continue
        leaves = [
            receipts.canonical([hotkey, commit.num_receipts, commit.head, commit.upload_digest, commit.checkpoints])
            for hotkey, commit in sorted(account.committed.items())
        ]
        if receipts.merkle_root(leaves) != account.root.root:
            return Finding(name=name, holds=False, detail=f"epoch {account.epoch}: the root is of other commitments")
        count += 1
    return Finding(name=name, holds=True, detail=f"{count} roots")


def check_posted(history: History) -> Finding:
    """What each validator said it computed is what the record yields, to the bit."""
    name = "scores posted by validators are the record's, to the bit"
    count = 0
    for entry in history.record.entries:
        if not isinstance(entry.fact, ScoresPosted):
            continue
        wrong = _wrong_in_post(entry.fact, history)
        if wrong:
            return Finding(name=name, holds=False, detail=f"event {entry.seq}: {entry.fact.validator} posted {wrong}")
        count += 1
    return Finding(name=name, holds=True, detail=f"{count} posts")


def _wrong_in_post(posted: ScoresPosted, history: History) -> str:
    if not 0 <= posted.segment < len(history.boards):
        return f"scores of segment {posted.segment}, which is not sealed"
    board = history.boards[posted.segment]
    if posted.ledger_head != board.head:
        return f"scores of another record than segment {posted.segment}'s"
    for what, theirs, ours in (("score", posted.scores, board.scores), ("weight", posted.weights, board.weights)):
        for hotkey in sorted(set(theirs) | set(ours)):
            if theirs.get(hotkey) != ours.get(hotkey):
                return f"{what} {theirs.get(hotkey)} for {hotkey}, the record yields {ours.get(hotkey)}"
    return ""


def check_roots(history: History, discovery: wire.Discovery, *, is_final: bool = False) -> Finding:
    """The roots on chain are the record's; of a run that goes on, the newest segment may not be there yet."""
    name = "roots on chain are the record's"
    record = history.record
    heads = [GENESIS_HEAD, *(board.head for board in history.boards)]
    shown = f"{discovery.n} segments, head {discovery.s[:16] or 'none'}"
    if discovery.n >= len(heads) or (discovery.n and discovery.s != heads[discovery.n]):
        detail = f"the chain has {shown}; here are {record.num_segments}, head {record.head[:16]}"
        return Finding(name=name, holds=False, detail=detail)
    missing = record.num_segments - discovery.n
    if missing > (0 if is_final else 1):
        return Finding(name=name, holds=False, detail=f"the newest {missing} segments are not on chain: it has {shown}")
    wrong = _wrong_commit_root(history, discovery, is_final=is_final)
    if wrong:
        return Finding(name=name, holds=False, detail=wrong)
    late = "; the newest is not on chain yet" if missing else ""
    detail = f"{shown}; commit root {discovery.m[:16]} of epoch {discovery.e}{late}"
    return Finding(name=name, holds=True, detail=detail)


def _wrong_commit_root(history: History, discovery: wire.Discovery, *, is_final: bool) -> str:
    roots = [entry.fact for entry in history.record.entries if isinstance(entry.fact, RootCommitted)]
    if not roots:
        return ""
    recorded = {root.epoch: root.root for root in roots}
    is_newer = discovery.e > roots[-1].epoch and not is_final
    if is_newer or (recorded.get(Epoch(discovery.e)) == discovery.m and discovery.e == roots[-1].epoch):
        return ""
    return (
        f"the chain has commit root {discovery.m[:16] or 'none'} of epoch {discovery.e}, "
        f"the record {roots[-1].root[:16]} of epoch {roots[-1].epoch}"
    )


def check_weights(
    history: History,
    metagraph: Metagraph,
    on_chain: Mapping[Hotkey, Mapping[Uid, int]],
    *,
    names: Mapping[Hotkey, str],
    is_final: bool = False,
) -> Finding:
    """The weights that validators have on chain are the record's within one step of u16 rounding.

    Of a run that goes on, a validator may still have those of the segment before.
    """
    name = "weights on chain are the scores, within u16 rounding"
    if not history.final_weights():
        return Finding(name=name, holds=None, detail="the record gives nobody a weight")
    posters = [hotkey for hotkey in sorted(on_chain) if on_chain[hotkey]]
    if not posters:
        return Finding(name=name, holds=False, detail="no validator has weights on chain")
    newest = len(history.boards) - 1
    for validator in posters:
        admitted = (newest,) if is_final or newest == 0 else (newest, newest - 1)
        wrong = [_wrong_weight(history.boards[index], metagraph, on_chain[validator], names) for index in admitted]
        if all(wrong):
            return Finding(name=name, holds=False, detail=f"{names.get(validator, validator)} gives {wrong[0]}")
    return Finding(
        name=name, holds=True, detail=f"{len(posters)} validators, {len(history.final_weights())} weights each"
    )


def _wrong_weight(board: Board, metagraph: Metagraph, found: Mapping[Uid, int], names: Mapping[Hotkey, str]) -> str:
    """The first weight that is not the board's, in words; empty when all are."""
    neurons = metagraph.by_hotkey()
    expected = {
        neurons[hotkey].uid: (value, hotkey) for hotkey, value in to_u16(board.weights).items() if hotkey in neurons
    }
    for uid in sorted(set(expected) | set(found)):
        value, hotkey = expected.get(uid, (0, Hotkey("")))
        if abs(found.get(uid, 0) - value) > 1:
            return (
                f"uid {uid} ({names.get(hotkey, hotkey) or 'no score'}) {found.get(uid, 0)}, the record yields {value}"
            )
    return ""


def published_epochs(history: History) -> tuple[Epoch, ...]:
    """Epochs that ended."""
    return tuple(entry.fact.epoch for entry in history.record.entries if isinstance(entry.fact, EpochPublished))
