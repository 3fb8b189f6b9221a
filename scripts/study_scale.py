"""How does the control plane bear many miners? Whole epochs through the real state machine and the real scoring, without
sockets or tensors.

    python scripts/study_scale.py --miners 1000,10000 --stages 32

Every miner joins, leases, attests each pass, commits, uploads, reduces its shards, steps and answers its audits; three validators
judge. Only what a miner would compute is made up. Prints the CPU time of each phase and of one event in it, memory, what the
public record costs those who read it, and what storing the state costs.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from benches.fleet import LEASES_AT_ONCE, RUN, chains, created, join

from neurons.flagging import find_flags
from neurons.scoring import Record, weighted
from subnet import receipts, wire
from subnet.config import AuditConfig, DeadlineConfig, MergeConfig, ModelConfig, RunConfig, TrainingConfig
from subnet.frames import digest
from subnet.merging.schedule import num_chunks
from subnet.orchestration import invariants, machine, views
from subnet.orchestration.events import (
    Answer,
    AnyEffect,
    AnyEvent,
    BlockSeen,
    ChainSeen,
    RefereeOuter,
    RefereeShard,
    Requested,
    RootIncluded,
    ShardRecomputed,
    StoreSegment,
    encode_event,
)
from subnet.orchestration.segments import encode_segment
from subnet.orchestration.state import State
from subnet.orchestration.stored import decode_state, encode_state
from subnet.types import BlobRef, Checkpoint, Digest, Hotkey, Lease, Outcome, Phase, Verdict

VALIDATORS = tuple(Hotkey(f"v{number}") for number in range(3))
CHUNK_BYTES = 1 << 20
"""Sixteen times the default: a commitment names each chunk, and the state holds all commitments of an epoch."""
ELEMENTS = 25_000_000
"""Of one stage: 100 MB of float32."""
RECEIPTS_A_POST = 8


def scale_config(num_miners: int, num_stages: int, batches: int) -> RunConfig:
    """Phases end by their quorum alone; a tenth of the miners is audited in each epoch."""
    return RunConfig(
        model=ModelConfig(width=64, num_layers=num_stages, num_heads=2, num_kv_heads=2, ffn_width=64),
        training=TrainingConfig(
            num_stages=num_stages, min_miners=num_miners, target_batches=batches, min_batches=1, accumulate=batches,
            quorum=0.8, microbatch_size=1, num_tokens=16,
        ),
        merge=MergeConfig(chunk_bytes=CHUNK_BYTES),
        audit=AuditConfig(probability=0.1, probation_epochs=0, checkpoint_every=64),
        deadlines=DeadlineConfig(
            gathering_s=86400, training_s=86400, committing_s=86400, uploading_s=86400, merging_s=86400, ready_s=86400,
            sample_s=86400, challenge_s=86400, verdict_s=86400, silent_s=86400,
        ),
    )  # fmt: skip


@dataclass
class Crowd:
    """All nodes of a run, and the orchestrator's state machine between them."""

    config: RunConfig
    miners: list[Hotkey]
    state: State = field(default_factory=State)
    segments: list[bytes] = field(default_factory=list)
    num_events: int = 0
    now_s: float = 0.0
    pending: list[AnyEffect] = field(default_factory=list)
    journal: list[bytes] | None = None
    """Every event as journaled, for whoever asks for it."""

    def feed(self, event: AnyEvent) -> list[AnyEffect]:
        """One event; what the edge would carry out is carried out."""
        self.num_events += 1
        if self.journal is not None:
            self.journal.append(encode_event(event))
        effects = machine.step(self.state, event, self.config)
        for effect in effects:
            if isinstance(effect, StoreSegment):
                self.segments.append(encode_segment(effect.segment))
            elif isinstance(effect, RefereeShard | RefereeOuter):
                self.pending.append(effect)
        return effects

    def ask(self, sender: Hotkey, request: wire.Request) -> wire.Response:
        """A request that must not be refused."""
        self.now_s += 1e-4
        event = Requested(at_s=self.now_s, sender=sender, request_id=str(self.num_events), request=request)
        answer = next(effect for effect in self.feed(event) if isinstance(effect, Answer)).response
        assert not isinstance(answer, wire.ErrorBody), answer
        return answer

    # ---- the phases of an epoch ----

    def gather(self) -> None:
        """Everybody joins."""
        begin = msgspec.structs.replace(
            created(self.config), num_elements=(ELEMENTS,) * self.config.training.num_stages
        )
        self.feed(begin)
        registered = tuple((hotkey, 1) for hotkey in sorted([*self.miners, *VALIDATORS]))
        self.feed(ChainSeen(at_s=0.0, registered=registered, permits=VALIDATORS))
        for validator in VALIDATORS:
            self.ask(validator, wire.Enlist())
        for miner in self.miners:
            self.ask(miner, join())

    def get_ready(self) -> None:
        """Everybody has loaded the epoch's params."""
        for miner in self.miners:
            anchor = self.state.snapshots[self.state.members[miner].stage].digest
            self.ask(miner, wire.Ready(epoch=self.state.epoch, anchor=anchor))

    def lease(self, batches: int) -> list[Lease]:
        """Every miner of stage 0 takes what an epoch asks of it."""
        leases: list[Lease] = []
        for miner in self.state.current.roster[0]:
            left = batches
            while left:
                answer = self.ask(miner, wire.LeaseSamples(epoch=self.state.epoch, count=min(left, LEASES_AT_ONCE)))
                assert isinstance(answer, wire.Leases)
                leases += answer.leases
                left -= len(answer.leases)
        return leases

    def train(self, leases: Sequence[Lease]) -> None:
        """Every pass is attested; miners post in turns, as they would."""
        todo = chains(leases)
        while todo:
            for miner in list(todo):
                request = todo[miner].next_post(RECEIPTS_A_POST)
                if request is None:
                    del todo[miner]
                else:
                    self.ask(miner, request)

    def commit(self) -> None:
        """Everybody commits; the root is included and its beacon seen."""
        epoch = self.state.epoch
        for miner in self.miners:
            work = self.state.current.work[miner]
            first = receipts.first_head(RUN, epoch, miner)
            ends = ((0, first, 0), (len(work.receipts), work.head, 1))
            checkpoints = tuple(
                Checkpoint(digest=_made(miner, epoch, place), num_steps=steps, num_receipts=place, head=head)
                for place, head, steps in ends
            )
            upload = _made(miner, epoch, "upload")
            self.ask(
                miner,
                wire.CommitEpoch(
                    epoch=epoch, num_receipts=len(work.receipts), head=work.head, checkpoints=checkpoints,
                    num_batches=len(work.credited), upload_digest=upload, upload_bytes=4 * ELEMENTS,
                    chunk_digests=tuple(_made(upload, n) for n in range(num_chunks(ELEMENTS, CHUNK_BYTES))),
                ),
            )  # fmt: skip
        self.feed(RootIncluded(at_s=self.now_s, epoch=epoch, at_block=10))
        self.feed(BlockSeen(at_s=self.now_s, epoch=epoch, at_block=12, block_hash=f"b{epoch + 1}"))

    def upload(self) -> None:
        """Every upload is in the store."""
        for miner in self.miners:
            self.ask(miner, wire.UploadDone(epoch=self.state.epoch))

    def reduce(self) -> None:
        """Both copies of every shard are reported; empty shards too."""
        epoch = self.state.epoch
        for merge in self.state.current.merges:
            assert merge.plan is not None
            copies: dict[Hotkey, list[wire.ReducedShard]] = {}
            for shard in merge.plan.shards:
                found = _made("shard", epoch, merge.plan.stage, shard.shard)
                for reducer in shard.reducers:
                    ref = BlobRef(key=f"{reducer}/{found}", digest=found, size_bytes=4 * (shard.stop - shard.start))
                    copies.setdefault(reducer, []).append(wire.ReducedShard(shard=shard.shard, ref=ref))
            for reducer, reported in copies.items():
                self.ask(reducer, wire.ReportReduced(epoch=epoch, shards=tuple(reported)))

    def step(self) -> None:
        """Every miner reports its outer step, the drawn ones store it."""
        epoch, merges = self.state.epoch, self.state.current.merges
        for merge in merges:
            assert merge.plan is not None
            found = _made("snapshot", epoch, merge.plan.stage)
            for upload in merge.plan.uploads:
                self.ask(upload.hotkey, wire.ReportOuter(epoch=epoch, digest=found, size_bytes=8 * ELEMENTS))
            for miner in merge.uploaders:
                ref = BlobRef(key=f"{miner}/{found}", digest=found, size_bytes=8 * ELEMENTS)
                self.ask(miner, wire.SnapshotDone(epoch=epoch, ref=ref))
        assert self.state.epoch == epoch + 1 and not self.pending

    def epoch(self, batches: int) -> None:
        """From the published params to the next seal, but for audits."""
        self.get_ready()
        self.train(self.lease(batches))
        self.commit()
        self.upload()
        self.reduce()
        self.step()

    def audit(self) -> None:
        """Every challenge is answered and judged; agreeing shards are recomputed."""
        for (epoch, miner), case in list(self.state.cases.items()):
            if case.outcome is not None:
                continue
            ends = (
                case.challenge.start_checkpoint.digest,
                case.challenge.end_checkpoint.digest,
                _made(miner, epoch, "e"),
            )
            start, end, evidence = (BlobRef(key=f"{miner}/{found}", digest=found, size_bytes=8) for found in ends)
            segment = case.challenge.segment
            self.ask(miner, wire.AnswerChallenge(epoch=epoch, segment=segment, start=start, end=end, evidence=evidence))
            verdict = Verdict(
                run_id=RUN,
                epoch=epoch,
                hotkey=miner,
                segment=segment,
                validator=case.asked[-1],
                outcome=Outcome.PASS,
                reason="",
            )
            self.ask(verdict.validator, wire.PostVerdict(verdict=verdict))
        for (epoch, stage, shard), audit in list(self.state.shard_audits.items()):
            self.feed(ShardRecomputed(at_s=self.now_s, epoch=epoch, stage=stage, shard=shard, ref=audit.accepted))


def _made(*parts: object) -> Digest:
    return digest("/".join(map(str, parts)).encode())


def crowd_of(num_miners: int, num_stages: int, batches: int) -> Crowd:
    """Before anybody has joined."""
    config = scale_config(num_miners, num_stages, batches)
    return Crowd(config, [Hotkey(f"m{number:05d}") for number in range(num_miners)])


@dataclass
class Table:
    """CPU time by phase, over all epochs."""

    crowd: Crowd
    seconds: dict[str, list[float]] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time a phase."""
        began, before = time.process_time(), self.crowd.num_events
        yield
        self.seconds.setdefault(name, []).append(time.process_time() - began)
        self.events[name] = self.crowd.num_events - before
        took, events = self.seconds[name][-1], self.events[name]
        each = f"{1e6 * took / events:10,.0f} us an event" if events else ""
        sys.stdout.write(f"  {name:<26} {took:9.2f} s  {events:>9,} events {each}\n")
        sys.stdout.flush()


def run(crowd: Crowd, batches: int, num_epochs: int) -> None:
    """Print what some epochs with so many miners take."""
    config, table = crowd.config, Table(crowd)
    num_miners, num_stages = len(crowd.miners), config.training.num_stages
    sys.stdout.write(f"{num_miners:,} miners in {num_stages} stages, {batches} samples each\n")
    with table.timed("join"):
        crowd.gather()
    record = Record()
    for epoch in range(num_epochs):
        sys.stdout.write(f" epoch {epoch}\n")
        with table.timed("ready"):
            crowd.get_ready()
        with table.timed("lease"):
            leases = crowd.lease(batches)
        with table.timed("a directive, 100 times"):
            for miner in crowd.miners[:100]:
                size = len(wire.encode(views.directive(crowd.state, miner)))
        with table.timed("receipts (and making them)"):
            crowd.train(leases)
        assert crowd.state.phase is Phase.COMMITTING, crowd.state.phase
        with table.timed("commit"):
            crowd.commit()
        with table.timed("upload"):
            crowd.upload()
        with table.timed("reduce"):
            crowd.reduce()
        with table.timed("outer step"):
            crowd.step()
        with table.timed("state encoded, at the seal"):
            data = encode_state(crowd.state, written_by="")
        with table.timed("state read"):
            again = decode_state(data)
        assert again == crowd.state
        with table.timed("audits"):
            crowd.audit()
        with table.timed("invariants, once"):
            invariants.check_state(crowd.state)
        with table.timed("reading the segment"):
            record.add(crowd.segments[-1])
        with table.timed("scores and weights"):
            weights = weighted(record, burn_hotkey=None)
        with table.timed("flags"):
            flags = find_flags(record.accounts, record.accounts.published()[-1].epoch, record.incentives().clasp)
        assert len(weights) == num_miners and not flags
        sys.stdout.write(
            f"  segment {len(crowd.segments[-1]) / 1e6:.0f} MB, directive {size / 1e3:.1f} kB, state {len(data) / 1e6:.1f} MB, "
            f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB\n"
        )


def main() -> None:
    """Run for each number of miners."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", default="1000", help="numbers of miners, with commas between")
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--batches", type=int, default=8, help="samples an epoch asks of each miner")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    for num_miners in map(int, arguments.miners.split(",")):
        run(crowd_of(num_miners, arguments.stages, arguments.batches), arguments.batches, arguments.epochs)


if __name__ == "__main__":
    main()
