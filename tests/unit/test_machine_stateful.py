"""Any requests, in any order, from anybody: the machine never raises, its invariants hold, and its journal rebuilds it."""

import contextlib
import copy

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from subnet import receipts, wire
from subnet.errors import InvariantBroken
from subnet.frames import digest
from subnet.lanes import lanes
from subnet.orchestration import machine, views
from subnet.orchestration.events import (
    AwaitBlock,
    BlockSeen,
    ChainSeen,
    CommitRoot,
    HeardFrom,
    OuterRefereed,
    RefereeOuter,
    RefereeShard,
    RootIncluded,
    ShardRefereed,
    decode_event,
    encode_event,
)
from subnet.orchestration.invariants import check_record, check_state
from subnet.orchestration.ledger import Credited
from subnet.orchestration.state import State
from subnet.orchestration.stored import decode_state, encode_state
from subnet.types import BlobRef, Epoch, Hotkey, Lease, NumericMode, Outcome, Phase, Receipt, SampleId, StageIndex
from tests.unit.orchestration import CONFIG, HERE, MINERS, STRANGER, VALIDATORS, Run, content, created, passes

CONFIG_SMALL = msgspec.structs.replace(CONFIG, training=msgspec.structs.replace(CONFIG.training, min_miners=3))
anybody = st.sampled_from([*MINERS, *VALIDATORS, STRANGER])
miners = st.sampled_from(MINERS)
epochs = st.sampled_from([Epoch(0), Epoch(1), Epoch(2), Epoch(-1)])
stages = st.integers(-1, 4).map(StageIndex)
digests = st.sampled_from([content(n) for n in range(3)])
refs = st.builds(BlobRef, key=st.just("k"), digest=digests, size_bytes=st.sampled_from([0, 8, 192, 256, 320]))


class AnyOrder(RuleBasedStateMachine):
    """Drives one run; what is sensible and what is not is drawn alike."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(config=CONFIG_SMALL)
        self.run.feed(created(CONFIG_SMALL))
        self.run.chain()
        for validator in VALIDATORS:
            self.enlist(validator)
        for miner in MINERS[:5]:
            self.join(miner, "a")
            self.ready(miner, is_right=True)

    def ask(self, sender: Hotkey, request: wire.Request) -> wire.Response:
        """A request, and at once the same again: the answer is the same, and nothing changes the second time."""
        request_id = f"id{self.run.num_requests}"
        answer = self.run.ask(sender, request, request_id=request_id)
        head = self.run.state.ledger.head
        assert self.run.ask(sender, request, request_id=request_id) == answer
        assert self.run.state.ledger.head == head
        return answer

    # ---- what time and chain do ----

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 25.0, 110.0, 1500.0]))
    def tick(self, seconds: float) -> None:
        self.run.tick(seconds)

    @rule(hotkey=anybody, is_live=st.booleans())
    def heard_from(self, hotkey: Hotkey, is_live: bool) -> None:
        self.run.feed(HeardFrom(at_s=self.run.now_s, hotkey=hotkey, is_live=is_live))

    @rule(gone=st.sets(anybody, max_size=2))
    def chain_seen(self, gone: set[Hotkey]) -> None:
        keys = tuple((hotkey, 1) for hotkey in sorted({*MINERS, *VALIDATORS} - gone))
        permits = tuple(name for name in VALIDATORS if name not in gone)
        self.run.feed(ChainSeen(at_s=self.run.now_s, registered=keys, permits=permits))

    @rule()
    def carry_out(self) -> None:
        """The edge does what it was asked to do, or was asked before a crash."""
        run = self.run
        for effect in machine.outstanding(run.state, run.config):
            match effect:
                case CommitRoot():
                    run.feed(RootIncluded(at_s=run.now_s, epoch=effect.epoch, at_block=10))
                case AwaitBlock():
                    beacon = f"b{effect.epoch + 1}"
                    run.feed(BlockSeen(at_s=run.now_s, epoch=effect.epoch, at_block=12, block_hash=beacon))
                case RefereeShard() | RefereeOuter():
                    run.effects = [effect]
                    run.referee()
                case _:
                    run.recompute()

    @rule(epoch=epochs, stage=st.integers(0, 2).map(StageIndex), ref=refs)
    def strange_events(self, epoch: Epoch, stage: StageIndex, ref: BlobRef) -> None:
        """Late echoes of effects that were carried out twice."""
        now = self.run.now_s
        self.run.feed(RootIncluded(at_s=now, epoch=epoch, at_block=3))
        if epoch != self.run.state.epoch:
            self.run.feed(BlockSeen(at_s=now, epoch=epoch, at_block=3, block_hash="x"))
            self.run.feed(ShardRefereed(at_s=now, epoch=epoch, stage=stage, shard=0, ref=ref))
            self.run.feed(OuterRefereed(at_s=now, epoch=epoch, stage=stage, ref=ref))

    @rule(late=anybody)
    def go_on(self, late: Hotkey) -> None:
        """What honest nodes, all but one of them in time, would do next."""
        match self.run.state.phase:
            case Phase.GATHERING | Phase.PUBLISHED:
                self.everybody_is_ready(late)
                self.tick(25.0)
            case Phase.TRAINING:
                self.everybody_works(2)
                self.tick(110.0)
            case Phase.COMMITTING | Phase.UPLOADING:
                self.everybody_commits_and_uploads(late)
                self.tick(25.0)
            case Phase.MERGING:
                self.merge("false", {late})
                self.carry_out()
                self.tick(15.0)
                self.carry_out()
            case Phase.CLOSING | Phase.FINISHED:
                self.carry_out()
                self.tick(1500.0)

    # ---- what members do ----

    @rule(sender=anybody, session=st.sampled_from(["a", "b"]))
    def join(self, sender: Hotkey, session: str) -> None:
        self.ask(sender, wire.Join(endpoint=HERE, mode=NumericMode.FP32, session=session))

    @rule(late=miners)
    def everybody_is_ready(self, late: Hotkey) -> None:
        for miner in MINERS:
            if miner != late and miner in self.run.state.members:
                self.ready(miner, is_right=True)

    @rule(sender=anybody)
    def enlist(self, sender: Hotkey) -> None:
        self.ask(sender, wire.Enlist())

    @rule(sender=anybody, session=st.sampled_from(["a", "b"]))
    def leave(self, sender: Hotkey, session: str) -> None:
        self.ask(sender, wire.Leave(num_open_samples=0, session=session))

    @rule(sender=anybody, is_right=st.booleans())
    def ready(self, sender: Hotkey, is_right: bool) -> None:
        member = self.run.state.members.get(sender)
        anchor = self.run.state.snapshots[member.stage].digest if member and is_right else content("x")
        self.ask(sender, wire.Ready(epoch=self.run.state.epoch, anchor=anchor))

    @rule(target=leases, sender=miners, count=st.integers(-1, 3))
    def lease(self, sender: Hotkey, count: int) -> tuple[Lease, ...]:
        answer = self.ask(sender, wire.LeaseSamples(epoch=self.run.state.epoch, count=count))
        return answer.leases if isinstance(answer, wire.Leases) else ()

    @rule(target=leases, found=leases, sender=anybody, stage=stages)
    def reroute(self, found: tuple[Lease, ...], sender: Hotkey, stage: StageIndex) -> tuple[Lease, ...]:
        for lease in found:
            before = lease.hops[stage - 1] if 0 < stage < 3 else sender
            answer = self.ask(before, wire.Reroute(lease=lease, stage=stage))
            if isinstance(answer, wire.Leases):
                return answer.leases
        return ()

    def post(self, sender: Hotkey, *fresh: Receipt) -> None:
        work = self.run.state.current.work.get(sender)
        head = work.head if work else receipts.first_head("run-1", self.run.state.epoch, sender)
        known = len(work.receipts) if work else 0
        request = wire.PostReceipts(
            epoch=self.run.state.epoch, num_before=known, receipts=fresh, head=receipts.extend(head, fresh)
        )
        self.ask(sender, request)

    @rule(found=leases, without=st.sets(st.integers(0, 2), max_size=2))
    def work(self, found: tuple[Lease, ...], without: set[int]) -> None:
        for lease in found:
            for stage in range(3):
                if stage not in without:
                    self.post(lease.hops[stage], *passes(lease, stage, 3))

    @rule(rounds=st.integers(1, 3))
    def everybody_works(self, rounds: int) -> None:
        for _ in range(rounds):
            for miner in self.run.state.current.roster[0] if self.run.state.current.roster else ():
                self.work(self.lease(miner, 1), set())

    @rule(found=leases, sender=anybody, stage=st.integers(0, 2), loss=st.sampled_from([None, 1.5]))
    def odd_receipts(self, found: tuple[Lease, ...], sender: Hotkey, stage: int, loss: float | None) -> None:
        for lease in found:
            forward, backward = passes(lease, stage, 3)
            self.post(sender, backward, msgspec.structs.replace(forward, loss=loss, output_digest=digest(b"odd")))
            self.post(sender, msgspec.structs.replace(forward, sample=SampleId(-1)))

    @rule(sender=anybody, num_receipts=st.integers(-1, 4), is_right=st.booleans())
    def resume(self, sender: Hotkey, num_receipts: int, is_right: bool) -> None:
        state = self.run.state
        heads = [receipts.first_head("run-1", state.epoch, sender)]
        if sender in state.current.work:
            heads += state.current.work[sender].heads
        head = heads[num_receipts] if is_right and 0 <= num_receipts < len(heads) else content("x")
        self.ask(sender, wire.Resume(epoch=state.epoch, num_receipts=num_receipts, head=head))

    @rule(sender=anybody, num_batches=st.sampled_from([0, 1, 10**9]))
    def commit(self, sender: Hotkey, num_batches: int) -> None:
        if sender in self.run.state.members:
            self.ask(sender, self.run.commitment(sender, num_batches=num_batches))

    @rule(late=anybody)
    def everybody_commits_and_uploads(self, late: Hotkey) -> None:
        for stage in self.run.state.current.roster:
            for miner in stage:
                self.commit(miner, 5)
        self.carry_out()
        self.carry_out()
        for miner in MINERS:
            if miner != late:
                self.upload(miner, self.run.state.epoch)

    @rule(sender=anybody, epoch=epochs)
    def upload(self, sender: Hotkey, epoch: Epoch) -> None:
        self.ask(sender, wire.UploadDone(epoch=epoch))

    @rule(sender=anybody, epoch=epochs, shard=st.integers(-1, 3), ref=refs)
    def report_reduced(self, sender: Hotkey, epoch: Epoch, shard: int, ref: BlobRef) -> None:
        shards = (wire.ReducedShard(shard=shard, ref=ref),)
        self.ask(sender, wire.ReportReduced(epoch=epoch, shards=shards))

    @rule(what=st.sampled_from(["honest", "false"]), who=st.sets(miners))
    def merge(self, what: str, who: set[Hotkey]) -> None:
        for miner in sorted(MINERS):
            with contextlib.suppress(AssertionError, IndexError, KeyError):
                self.run.reduce(miner, what if miner in who else "honest")
                self.run.outer(miner, what if miner in who else "honest")
                self.run.store(miner, what if miner in who else "honest")

    @rule(sender=anybody, epoch=epochs, ref=refs)
    def outer(self, sender: Hotkey, epoch: Epoch, ref: BlobRef) -> None:
        self.ask(sender, wire.ReportOuter(epoch=epoch, digest=ref.digest, size_bytes=8))
        self.ask(sender, wire.SnapshotDone(epoch=epoch, ref=ref))

    @rule(sender=anybody, outcomes=st.lists(st.sampled_from(list(Outcome)), max_size=3), is_absent=st.booleans())
    def audit(self, sender: Hotkey, outcomes: list[Outcome], is_absent: bool) -> None:
        for (epoch, miner), case in list(self.run.state.cases.items()):
            if not is_absent:
                self.ask(miner, self.run.answer(miner, epoch))
            for outcome in outcomes:
                validator = case.asked[-1]
                self.ask(validator, self.run.verdict(validator, miner, outcome, epoch))
            self.ask(sender, self.run.verdict(sender, miner, Outcome.FAIL, epoch))

    @rule(sender=anybody, epoch=epochs, segment=st.integers(-1, 3))
    def evaluate_and_score(self, sender: Hotkey, epoch: Epoch, segment: int) -> None:
        self.ask(sender, wire.PostEvaluation(epoch=epoch, loss=1.0, loss_wires_zeroed=2.0))
        scores = wire.PostScores(segment=segment, ledger_head=content("x"), scores={}, weights={})
        self.ask(sender, scores)

    # ---- what must hold at every moment ----

    @invariant()
    def state_and_record_hold(self) -> None:
        check_state(self.run.state)
        check_record(self.run.entries, lanes(self.run.config))

    @invariant()
    def nothing_was_left_that_another_look_would_find(self) -> None:
        """A turn that does not look whether its phase can end relies on it: nothing that ended it was kept quiet."""
        again = copy.deepcopy(self.run.state)
        before = (again.phase, again.epoch, again.ledger.num_entries)
        effects = machine.step(again, HeardFrom(at_s=again.now_s, hotkey=STRANGER, is_live=True), self.run.config)
        assert (again.phase, again.epoch, again.ledger.num_entries, effects) == (*before, [])

    @invariant()
    def everybody_is_told_something(self) -> None:
        state = self.run.state
        for hotkey in state.members:
            if hotkey in state.registered:
                assert views.directive(state, hotkey).epoch == state.epoch
        assert (
            machine.next_tick_s(state, self.run.config) >= state.now_s or state.phase is Phase.FINISHED or state.cases
        )

    def teardown(self) -> None:
        """The journal, through its bytes, gives the same state: same head, same views, same answers.

        So does a state that was stored and read again before every fifth event: same effects at each, same bytes in the end.
        """
        again, restarted = State(), State()
        for number, event in enumerate(self.run.events):
            event = decode_event(encode_event(event))
            if number % 5 == 0:
                restarted = decode_state(encode_state(restarted, written_by=""))
            effects = machine.step(again, event, self.run.config)
            assert machine.step(restarted, event, self.run.config) == effects
        assert again == restarted == self.run.state
        assert again.ledger.head == self.run.state.ledger.head
        live = encode_state(self.run.state, written_by="")
        assert encode_state(again, written_by="") == encode_state(restarted, written_by="") == live
        assert machine.outstanding(restarted, self.run.config) == machine.outstanding(again, self.run.config)


def test_any_order_of_requests() -> None:
    run_state_machine_as_test(
        AnyOrder, settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
    )


def test_a_breach_would_be_seen() -> None:
    """The invariant that the rules above are held to does look."""
    run = Run(config=CONFIG_SMALL)
    run.begin(*MINERS[:3])
    run.work(run.lease(MINERS[2])[0])
    with pytest.raises(InvariantBroken, match="credited twice"):
        check_record(
            [*run.entries, *(entry for entry in run.entries if isinstance(entry.fact, Credited))], lanes(run.config)
        )
