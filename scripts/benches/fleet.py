"""A thousand simulated miners: keys, joining, leases, and receipt chains whose digests fit those of their neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from incentives.config import IncentiveConfig
from subnet import receipts, wire
from subnet.adapters.auth import KeypairSigner
from subnet.config import AuditConfig, DeadlineConfig, ModelConfig, RunConfig, TrainingConfig, config_bytes
from subnet.frames import digest
from subnet.orchestration.events import Created
from subnet.types import (
    BlobRef,
    Digest,
    Direction,
    Endpoint,
    Epoch,
    Hotkey,
    Lease,
    NumericMode,
    Receipt,
    StageIndex,
)

RUN = "bench"
EPOCH = Epoch(0)
LEASES_AT_ONCE = 64


def fleet_config(num_stages: int, num_miners: int) -> RunConfig:
    """Phases so long that only training is measured."""
    return RunConfig(
        model=ModelConfig(width=64, num_layers=num_stages, num_heads=2, num_kv_heads=2, ffn_width=64),
        training=TrainingConfig(
            num_stages=num_stages, min_miners=num_miners, target_batches=1_000_000, microbatch_size=1, num_tokens=16
        ),
        audit=AuditConfig(),
        deadlines=DeadlineConfig(gathering_s=3600, training_s=36000, sample_s=36000, silent_s=3600),
    )


def keys(num_miners: int) -> list[KeypairSigner]:
    """Hotkeys of the fleet."""
    return [KeypairSigner.from_uri(f"//Fleet//{number}") for number in range(num_miners)]


def created(config: RunConfig, *, at_s: float = 0.0) -> Created:
    """A run that begins from snapshots nobody will load."""
    stages = range(config.training.num_stages)
    refs = [BlobRef(key=f"runs/{RUN}/s{stage}", digest=digest(b"%d" % stage), size_bytes=1) for stage in stages]
    return Created(
        at_s=at_s,
        run_id=RUN,
        config_json=config_bytes(config).decode(),
        incentives_json=wire.encode(IncentiveConfig()).decode(),
        corpus_digest=digest(b"text"),
        snapshots=tuple(refs),
        num_elements=tuple(1 for _ in stages),
        stage_flops=tuple(1 for _ in stages),
        beacon="bench",
    )


def join() -> wire.Join:
    """First words of every miner."""
    return wire.Join(endpoint=Endpoint(host="127.0.0.1", port=1), mode=NumericMode.FP32, session="s")


def ready(config: RunConfig, stage: int) -> wire.Ready:
    """A miner that holds its stage's snapshot."""
    return wire.Ready(epoch=EPOCH, anchor=created(config).snapshots[stage].digest)


@dataclass(slots=True)
class Chain:
    """One miner's receipts of an epoch, and how far they are posted."""

    epoch: Epoch
    head: Digest
    receipts: list[Receipt] = field(default_factory=list)
    num_posted: int = 0

    @property
    def num_left(self) -> int:
        """Receipts not posted yet."""
        return len(self.receipts) - self.num_posted

    def next_post(self, count: int) -> wire.PostReceipts | None:
        """The next `count` receipts, or None when there are no more."""
        part = tuple(self.receipts[self.num_posted : self.num_posted + count])
        if not part:
            return None
        self.head = receipts.extend(self.head, part)
        request = wire.PostReceipts(epoch=self.epoch, num_before=self.num_posted, receipts=part, head=self.head)
        self.num_posted += len(part)
        return request


def chains(leases: Sequence[Lease]) -> dict[Hotkey, Chain]:
    """What the miners of these leases will attest: each sample forward through its pathway, then backward."""
    found: dict[Hotkey, Chain] = {}
    for lease in leases:
        last = len(lease.hops) - 1
        cuts = [digest(f"{lease.epoch} {lease.sample} down {cut}".encode()) for cut in range(last + 2)]
        ups = [digest(f"{lease.epoch} {lease.sample} up {cut}".encode()) for cut in range(last + 1)]
        for stage, hotkey in enumerate(lease.hops):
            chain = found.setdefault(hotkey, Chain(lease.epoch, receipts.first_head(RUN, lease.epoch, hotkey)))
            loss = 1.0 + int(lease.sample) % 97 / 100 if stage == last else None
            chain.receipts.append(_receipt(lease, stage, Direction.FORWARD, cuts[stage], cuts[stage + 1], loss))
            given = cuts[last + 1] if stage == last else ups[stage]
            sent = ups[stage - 1] if stage else Digest("")
            chain.receipts.append(_receipt(lease, stage, Direction.BACKWARD, given, sent, None))
    return found


def _receipt(
    lease: Lease, stage: int, direction: Direction, given: Digest, sent: Digest, loss: float | None
) -> Receipt:
    return Receipt(
        run_id=RUN,
        epoch=lease.epoch,
        sample=lease.sample,
        branch=0,
        stage=StageIndex(stage),
        direction=direction,
        params_version=0,
        input_digest=given,
        output_digest=sent,
        loss=loss,
    )
