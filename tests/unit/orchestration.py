"""Driving the state machine by hand: requests as miners and validators would send them, one event after the other."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from subnet import receipts, wire
from subnet.config import AuditConfig, DeadlineConfig, MergeConfig, RunConfig, TrainingConfig
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.merging.upload import chunk_digests
from subnet.orchestration import machine
from subnet.orchestration.events import (
    Answer,
    AnyEffect,
    AnyEvent,
    BlockSeen,
    ChainSeen,
    Created,
    DeleteObjects,
    OuterRefereed,
    RefereeOuter,
    RefereeShard,
    Requested,
    RootIncluded,
    ShardRecomputed,
    ShardRefereed,
    StoreSegment,
    Ticked,
)
from subnet.orchestration.ledger import Entry, Fact, Segment
from subnet.orchestration.state import State
from subnet.types import (
    NO_DIGEST,
    BlobRef,
    Checkpoint,
    Digest,
    Direction,
    Endpoint,
    Epoch,
    Hotkey,
    Lease,
    NumericMode,
    Outcome,
    Phase,
    Receipt,
    StageIndex,
    Verdict,
)

F = TypeVar("F", bound=Fact)

RUN = "run-1"
FIRST = Epoch(0)
NUM_ELEMENTS = (64, 48, 80)
CONFIG = RunConfig(
    training=TrainingConfig(
        num_stages=3, target_batches=2, min_batches=1, accumulate=1, num_epochs=2, max_reroutes=1, min_miners=6
    ),
    merge=MergeConfig(chunk_bytes=64),
    audit=AuditConfig(probability=1.0, ban_epochs=5),
    deadlines=DeadlineConfig(
        gathering_s=20.0,
        training_s=100.0,
        committing_s=20.0,
        uploading_s=20.0,
        merging_s=20.0,
        ready_s=20.0,
        sample_s=30.0,
        challenge_s=1000.0,
        verdict_s=1000.0,
    ),
)
HERE = Endpoint(host="h", port=1)
START = BlobRef(key="genesis", digest=digest(b"genesis"), size_bytes=8)
MINERS = tuple(Hotkey(f"m{n}") for n in range(1, 7))
NINE = (*MINERS, Hotkey("m7"), Hotkey("m8"), Hotkey("m9"))
VALIDATORS = (Hotkey("v1"), Hotkey("v2"), Hotkey("v3"))
STRANGER = Hotkey("stranger")


def content(*parts: object) -> Digest:
    """Digest that depends on the parts."""
    return digest("/".join(map(str, parts)).encode())


def created(config: RunConfig = CONFIG) -> Created:
    """Genesis of a run in which every stage starts from the same object."""
    stages = config.training.num_stages
    return Created(
        at_s=0.0,
        run_id=RUN,
        config_json="{}",
        incentives_json="{}",
        corpus_digest=content("corpus"),
        snapshots=(START,) * stages,
        num_elements=NUM_ELEMENTS[:stages],
        stage_flops=(10, 20, 40)[:stages],
        beacon="b0",
    )


@dataclass
class Run:
    """A state machine, its journal, and the whole record it wrote."""

    config: RunConfig = CONFIG
    state: State = field(default_factory=State)
    now_s: float = 0.0
    events: list[AnyEvent] = field(default_factory=list)
    effects: list[AnyEffect] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    deleted_folders: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    num_requests: int = 0

    def feed(self, event: AnyEvent) -> list[AnyEffect]:
        """One event; what it asks for is also kept in `effects`."""
        self.events.append(event)
        effects = machine.step(self.state, event, self.config)
        self.effects += effects
        self.deleted += [key for effect in effects if isinstance(effect, DeleteObjects) for key in effect.keys]
        self.deleted_folders += [
            name for effect in effects if isinstance(effect, DeleteObjects) for name in effect.folders
        ]
        self.segments += [effect.segment for effect in effects if isinstance(effect, StoreSegment)]
        seen = {entry.seq for entry in self.entries}
        sealed = [e for effect in effects if (segment := getattr(effect, "segment", None)) for e in segment.entries]
        for entry in [*sealed, *(self.state.ledger.tail or ())]:
            if entry.seq not in seen:
                self.entries.append(entry)
        return effects

    def ask(self, sender: Hotkey, request: wire.Request, *, request_id: str | None = None) -> wire.Response:
        """Send a request and return its answer."""
        self.num_requests += 1
        name = request_id or f"r{self.num_requests}"
        event = Requested(at_s=self.now_s, sender=sender, request_id=name, request=request)
        (answer,) = [effect for effect in self.feed(event) if isinstance(effect, Answer)]
        return answer.response

    def refusal(self, sender: Hotkey, request: wire.Request) -> str:
        """Code of the refusal of a request."""
        answer = self.ask(sender, request)
        assert isinstance(answer, wire.ErrorBody), answer
        return answer.code

    def done(self, sender: Hotkey, request: wire.Request) -> None:
        """Send a request that must be taken."""
        answer = self.ask(sender, request)
        assert isinstance(answer, wire.Done), answer

    def tick(self, seconds: float = 0.0) -> list[AnyEffect]:
        """Let time pass."""
        self.now_s += seconds
        return self.feed(Ticked(at_s=self.now_s))

    def facts(self, kind: type[F]) -> list[F]:
        """Facts of a kind, in order."""
        return [entry.fact for entry in self.entries if isinstance(entry.fact, kind)]

    def is_in(self, phase: Phase) -> bool:
        """Whether the run is in this phase."""
        return self.state.phase is phase

    # ---- whole phases ----

    def chain(
        self, *, registered: tuple[Hotkey, ...] = (*NINE, *VALIDATORS), permits: tuple[Hotkey, ...] = VALIDATORS
    ) -> None:
        """The chain shows these keys."""
        keys = tuple((hotkey, 1) for hotkey in sorted(registered))
        self.feed(ChainSeen(at_s=self.now_s, registered=keys, permits=permits))

    def join(self, *miners: Hotkey) -> None:
        """Miners join, in order."""
        for miner in miners:
            request = wire.Join(endpoint=HERE, mode=NumericMode.FP32, session=f"{miner}-1")
            assert isinstance(self.ask(miner, request), wire.Joined)

    def ready(self, *miners: Hotkey) -> None:
        """Miners hold the epoch's params."""
        for miner in miners:
            anchor = self.state.snapshots[self.state.members[miner].stage].digest
            self.done(miner, wire.Ready(epoch=self.state.epoch, anchor=anchor))

    def stage_of(self, miner: Hotkey) -> StageIndex:
        """Stage of a member."""
        return self.state.members[miner].stage

    def lease(self, miner: Hotkey, count: int = 1) -> list[Lease]:
        """Leases for a miner of stage 0."""
        answer = self.ask(miner, wire.LeaseSamples(epoch=self.state.epoch, count=count))
        assert isinstance(answer, wire.Leases), answer
        return list(answer.leases)

    def post(self, miner: Hotkey, *fresh: Receipt) -> wire.Response:
        """Post receipts that follow what is recorded."""
        work = self.state.current.work.get(miner)
        head = work.head if work else receipts.first_head(RUN, self.state.epoch, miner)
        known = len(work.receipts) if work else 0
        request = wire.PostReceipts(
            epoch=self.state.epoch, num_before=known, receipts=fresh, head=receipts.extend(head, fresh)
        )
        return self.ask(miner, request)

    def work(self, lease: Lease, *, without: tuple[Hotkey, ...] = ()) -> None:
        """Every miner of a pathway does its passes and says so."""
        first = lanes(self.config).of_sample(lease.sample).start
        for hop, miner in enumerate(lease.hops):
            if miner not in without:
                done = passes(lease, hop, len(lease.hops))
                moved = [msgspec.structs.replace(receipt, stage=StageIndex(first + hop)) for receipt in done]
                assert isinstance(self.post(miner, *moved), wire.Ack)

    def commitment(self, miner: Hotkey, **changes: Any) -> wire.CommitEpoch:
        """What a miner would commit to now, with a checkpoint at both ends."""
        epoch = self.state.epoch
        work = self.state.current.work.get(miner)
        first = receipts.first_head(RUN, epoch, miner)
        ends = [Checkpoint(digest=content(miner, epoch, "start"), num_steps=0, num_receipts=0, head=first)]
        if work:
            count = len(work.receipts)
            ends.append(
                Checkpoint(digest=content(miner, epoch, "end"), num_steps=1, num_receipts=count, head=work.head)
            )
        data = upload_bytes(miner, epoch, NUM_ELEMENTS[self.stage_of(miner)])
        request = wire.CommitEpoch(
            epoch=epoch,
            num_receipts=ends[-1].num_receipts,
            head=ends[-1].head,
            checkpoints=tuple(ends),
            num_batches=99,
            upload_digest=digest(data),
            upload_bytes=len(data),
            chunk_digests=chunk_digests(data, self.config.merge.chunk_bytes),
        )
        return msgspec.structs.replace(request, **changes)

    def begin(self, *miners: Hotkey) -> None:
        """From nothing to the training phase of epoch 0, with three validators enlisted."""
        self.feed(created(self.config))
        self.chain()
        for validator in VALIDATORS:
            self.done(validator, wire.Enlist())
        self.join(*miners)
        self.ready(*miners)
        if self.is_in(Phase.GATHERING):
            self.tick(self.config.deadlines.gathering_s)
        assert self.is_in(Phase.TRAINING)

    def train(self, rounds: int = 2) -> None:
        """Every miner with whom samples begin works on some; who has nothing to do afterwards is the deadline's business."""
        roster = self.state.current.roster
        for _ in range(rounds):
            for miner in [hotkey for lane in lanes(self.config) for hotkey in roster[lane.start]]:
                if self.is_in(Phase.TRAINING):
                    self.work(self.lease(miner)[0])
        if self.is_in(Phase.TRAINING):
            self.tick(self.config.deadlines.training_s)
        assert self.is_in(Phase.COMMITTING)

    def commit(self, *miners: Hotkey) -> None:
        """Everybody in the roster, or these alone, commit; then the root and the beacon are on chain."""
        everybody = [hotkey for stage in self.state.current.roster for hotkey in stage]
        for miner in miners or everybody:
            self.done(miner, self.commitment(miner))
        if not self.state.current.commit_root:
            self.tick(self.config.deadlines.committing_s)
        self.beacon()

    def beacon(self) -> None:
        """The root is included, and its beacon's block is final."""
        epoch = self.state.epoch
        self.feed(RootIncluded(at_s=self.now_s, epoch=epoch, at_block=10))
        self.feed(BlockSeen(at_s=self.now_s, epoch=epoch, at_block=12, block_hash=f"b{epoch + 1}"))
        assert self.is_in(Phase.UPLOADING)

    def upload(self) -> None:
        """Everybody who committed uploads."""
        for miner in sorted(self.state.current.commits):
            self.done(miner, wire.UploadDone(epoch=self.state.epoch))
        assert self.is_in(Phase.MERGING)

    def copy(self, miner: Hotkey, shard: wire.ShardPlan, what: str = "honest") -> wire.ReducedShard:
        """A copy of a shard as a miner would report it."""
        found = content("shard", self.stage_of(miner), shard.shard, what)
        ref = BlobRef(key=f"{miner}/{shard.shard}-{found}", digest=found, size_bytes=(shard.stop - shard.start) * 4)
        return wire.ReducedShard(shard=shard.shard, ref=ref)

    def reduce(self, miner: Hotkey, what: str = "honest") -> None:
        """A miner reports all its shards."""
        plan = self.state.current.merges[self.stage_of(miner)].plan
        assert plan is not None
        copies = tuple(self.copy(miner, shard, what) for shard in plan.shards if miner in shard.reducers)
        self.done(miner, wire.ReportReduced(epoch=self.state.epoch, shards=copies))

    def snapshot(self, miner: Hotkey, what: str = "honest") -> BlobRef:
        """The snapshot a miner would store."""
        found = content("snapshot", self.state.epoch, self.stage_of(miner), what)
        return BlobRef(key=f"{miner}/{found}", digest=found, size_bytes=8)

    def outer(self, miner: Hotkey, what: str = "honest") -> None:
        """A miner reports its outer step."""
        ref = self.snapshot(miner, what)
        self.done(miner, wire.ReportOuter(epoch=self.state.epoch, digest=ref.digest, size_bytes=8))

    def store(self, miner: Hotkey, what: str = "honest") -> None:
        """A drawn miner stores its snapshot."""
        self.done(miner, wire.SnapshotDone(epoch=self.state.epoch, ref=self.snapshot(miner, what)))

    def referee(self) -> None:
        """The orchestrator carries out what it was last asked to referee."""
        pending, self.effects = self.effects, []
        for effect in pending:
            if isinstance(effect, RefereeShard):
                plan, shard = effect.plan, effect.plan.shards[effect.shard]
                found = content("shard", plan.stage, shard.shard, "honest")
                ref = BlobRef(key=f"o/{found}", digest=found, size_bytes=(shard.stop - shard.start) * 4)
                self.feed(
                    ShardRefereed(at_s=self.now_s, epoch=plan.epoch, stage=plan.stage, shard=shard.shard, ref=ref)
                )
            if isinstance(effect, RefereeOuter):
                found = content("snapshot", effect.epoch, effect.stage, "honest")
                ref = BlobRef(key=f"o/{found}", digest=found, size_bytes=8)
                self.feed(OuterRefereed(at_s=self.now_s, epoch=effect.epoch, stage=effect.stage, ref=ref))

    def recompute(self) -> None:
        """The orchestrator recomputes the agreeing shards that were drawn, and finds nothing wrong."""
        for (epoch, stage, shard), audit in list(self.state.shard_audits.items()):
            self.feed(ShardRecomputed(at_s=self.now_s, epoch=epoch, stage=stage, shard=shard, ref=audit.accepted))

    def merge(self) -> None:
        """Every stage is merged and published by honest miners."""
        epoch = self.state.epoch
        self.effects = []
        rosters = self.state.current.merges
        for stage_merge in rosters:
            for upload in stage_merge.plan.uploads if stage_merge.plan else ():
                self.reduce(upload.hotkey)
        self.referee()
        for stage_merge in rosters:
            for upload in stage_merge.plan.uploads if stage_merge.plan else ():
                self.outer(upload.hotkey)
            for miner in stage_merge.uploaders:
                self.store(miner)
        self.referee()
        assert self.state.epoch == epoch + 1

    def answer(self, miner: Hotkey, epoch: Epoch = FIRST) -> wire.AnswerChallenge:
        """What an honest miner presents when challenged."""
        challenge = self.state.cases[epoch, miner].challenge
        ends = (challenge.start_checkpoint.digest, challenge.end_checkpoint.digest, content(miner, "evidence"))
        refs = [BlobRef(key=f"{miner}/{found}", digest=found, size_bytes=8) for found in ends]
        return wire.AnswerChallenge(
            epoch=epoch, segment=challenge.segment, start=refs[0], end=refs[1], evidence=refs[2]
        )

    def verdict(self, validator: Hotkey, miner: Hotkey, outcome: Outcome, epoch: Epoch = FIRST) -> wire.PostVerdict:
        """What a validator finds."""
        segment = self.state.cases[epoch, miner].challenge.segment
        found = Verdict(
            run_id=RUN, epoch=epoch, hotkey=miner, segment=segment, validator=validator, outcome=outcome, reason="why"
        )
        return wire.PostVerdict(verdict=found)


def upload_bytes(miner: Hotkey, epoch: int, num_elements: int) -> bytes:
    """A pseudo-gradient, as far as the machine looks at it."""
    return f"{miner}{epoch}".encode().ljust(4, b".")[:4] * num_elements


def passes(lease: Lease, stage: int, num_stages: int) -> tuple[Receipt, Receipt]:
    """Forward and backward receipt of one stage of a sample; neighbours name the same digests."""

    def wire_digest(direction: Direction, cut: int) -> Digest:
        return content(direction, lease.epoch, lease.sample, cut)

    is_last = stage == num_stages - 1
    loss = digest(b"loss")
    forward = Receipt(
        run_id=RUN,
        epoch=lease.epoch,
        sample=lease.sample,
        branch=0,
        stage=StageIndex(stage),
        direction=Direction.FORWARD,
        params_version=0,
        input_digest=wire_digest(Direction.FORWARD, stage),
        output_digest=loss if is_last else wire_digest(Direction.FORWARD, stage + 1),
        loss=1.5 if is_last else None,
    )
    backward = msgspec.structs.replace(
        forward,
        direction=Direction.BACKWARD,
        input_digest=loss if is_last else wire_digest(Direction.BACKWARD, stage + 1),
        output_digest=wire_digest(Direction.BACKWARD, stage) if stage else NO_DIGEST,
        loss=None,
    )
    return forward, backward
