"""From the sealed ledger to scores and weights: the same fold for validators, auditors and the local report."""

from dataclasses import dataclass, field

import msgspec

from incentives.config import IncentiveConfig
from incentives.reward import EpochOutcome, Score, scores
from incentives.weights import weights
from subnet import wire
from subnet.config import RunConfig
from subnet.errors import InvalidConfig, InvariantBroken, NotFound
from subnet.orchestration.accounts import Accounts
from subnet.orchestration.invariants import check_weights
from subnet.orchestration.ledger import GENESIS_HEAD, Entry, Segment
from subnet.orchestration.segments import decode_segment
from subnet.ports import PublicRecord
from subnet.types import Digest, Hotkey

SEGMENT_LIMIT_BYTES = 256 << 20


@dataclass(slots=True)
class Record:
    """The part of a run's ledger that was read so far, every head recomputed."""

    entries: list[Entry] = field(default_factory=list)
    accounts: Accounts = field(default_factory=Accounts)
    num_segments: int = 0
    head: Digest = GENESIS_HEAD

    def add(self, data: bytes) -> Segment:
        """Check and take the next segment object. Raises InvariantBroken naming the entry that does not hold."""
        segment = decode_segment(data, index=self.num_segments, previous_head=self.head, first_seq=len(self.entries))
        self.entries += segment.entries
        self.accounts.add(segment.entries)
        self.num_segments += 1
        self.head = segment.head
        return segment

    async def follow(self, public: PublicRecord, until: int) -> None:
        """Read segments up to `until` of them. Raises InvariantBroken, NotFound, TransientFailure."""
        while self.num_segments < until:
            self.add(await public.read(f"ledger/{self.num_segments}", limit_bytes=SEGMENT_LIMIT_BYTES))

    def incentives(self) -> IncentiveConfig:
        """The knobs of pay that the run was created with. Raises InvariantBroken."""
        if self.accounts.created is None:
            raise InvariantBroken("the record does not begin with the run's creation")
        return msgspec.json.decode(self.accounts.created.incentives_json, type=IncentiveConfig)

    def run_config(self) -> RunConfig:
        """What the run was created with otherwise. Raises InvariantBroken, InvalidConfig (another version's knobs)."""
        if self.accounts.created is None:
            raise InvariantBroken("the record does not begin with the run's creation")
        try:
            return msgspec.json.decode(self.accounts.created.config_json, type=RunConfig)
        except msgspec.ValidationError as error:
            raise InvalidConfig(
                f"this run was created by another version of Strata, whose knobs this one does not know: {error}. "
                "Install the version that its nodes run."
            ) from error


def outcomes(accounts: Accounts) -> list[EpochOutcome]:
    """What each published epoch comes to. Raises InvariantBroken when the record has no beginning."""
    if accounts.created is None:
        raise InvariantBroken("the record does not begin with the run's creation")
    flops = accounts.created.stage_flops
    return [
        EpochOutcome(
            epoch=account.epoch,
            contributions=account.contributions(flops),
            failed=account.failed,
            voided=account.voided,
        )
        for account in accounts.published()
    ]


def scored(record: Record) -> dict[Hotkey, Score]:
    """Score of every hotkey the record names."""
    return scores(outcomes(record.accounts), record.incentives())


def weighted(record: Record, *, burn_hotkey: Hotkey | None) -> dict[Hotkey, float]:
    """Weights that a validator posts from this record. Raises InvariantBroken."""
    result = weights(scored(record), record.incentives(), burn_hotkey=burn_hotkey)
    check_weights(result)
    return result


def parse_discovery(data: bytes | None) -> wire.Discovery:
    """The owner's on-chain record. Raises NotFound when there is none, ProtocolViolation when it is not ours."""
    if data is None:
        raise NotFound("the subnet's owner has not committed a Strata run")
    return wire.decode(wire.Discovery, data)
