"""What the orchestrator starts from: the state stored at the last seal and the journal after it, or an old journal alone."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from neurons.exit_codes import ExitCode, exit_code_of
from neurons.roles.keeping import Keeper
from neurons.roles.orchestrator import Orchestrator
from subnet import wire
from subnet.adapters.memory import MemoryBlobStore, MemoryStateStore
from subnet.errors import DamagedState, InvariantBroken, OtherVersion, StrataError, Superseded, TransientFailure
from subnet.orchestration import stored
from subnet.orchestration.events import Created, encode_event
from subnet.orchestration.segments import encode_segment, segment_key
from subnet.orchestration.state import State
from subnet.orchestration.stored import encode_state
from subnet.ports import StoredState
from subnet.sim.loop import run as run_in_virtual_time
from tests.unit.orchestration import CONFIG, MINERS, RUN, Run
from tests.unit.orchestrators import World, killed


class AwayBlobs(MemoryBlobStore):
    """A blob store that cannot be reached for a while."""

    is_away = False
    deletes_nothing = False

    async def put(self, key: str, data: bytes | memoryview) -> None:
        if self.is_away:
            raise TransientFailure("away")
        await super().put(key, data)

    async def delete_under(self, prefix: str) -> None:
        if self.deletes_nothing:
            raise TransientFailure("away")
        await super().delete_under(prefix)


class Machine(World):
    """The stores of one run, in which orchestrators start and are killed. Nobody is registered: what happened is in `run`."""

    def __init__(self) -> None:
        super().__init__()
        self.blobs: AwayBlobs = AwayBlobs(self.clock)
        self.run = Run()
        self.run.begin(*MINERS)
        self.run.train()
        self.run.commit()
        self.run.upload()
        self.run.merge()

    async def write_journal(self) -> int:
        """Everything that happened, as journaled by an orchestrator that was then killed; returns the newest record's number."""
        number = 0
        for event in self.run.events:
            number = await self.store.append([encode_event(event)])
        return number

    async def entries(self) -> list[bytes]:
        """What the next start has to replay."""
        kept = await self.store.get_state()
        return [entry async for entry in self.store.read(after=kept.at_record if kept else 0)]

    @contextlib.asynccontextmanager
    async def started(self, run_id: str = RUN) -> AsyncIterator[Orchestrator]:
        """An orchestrator for as long as the block runs; then it is killed. Raises what ends it before."""

        def genesis() -> Created:
            raise AssertionError("the run exists")

        orchestrator = self.orchestrator(CONFIG, run_id=run_id, genesis=genesis)
        task = asyncio.create_task(orchestrator.run())
        await self.clock.sleep(0.1)
        if task.done():
            await task
        yield orchestrator
        if task.done():
            await task
        await killed(task)


def with_machine(story: Callable[[Machine], Awaitable[None]]) -> None:
    async def main() -> None:
        await story(Machine())

    run_in_virtual_time(main())


async def discovery(orchestrator: Orchestrator) -> wire.Discovery:
    return wire.decode(wire.Discovery, await orchestrator.public("run") or b"")


def test_an_old_journal_is_replayed_once_and_then_replaced_by_the_state() -> None:
    async def story(machine: Machine) -> None:
        number = await machine.write_journal()
        (segment,) = machine.run.segments
        async with machine.started() as first:
            assert first.state.ledger == machine.run.state.ledger
            assert await machine.blobs.get(segment_key(RUN, 0)) == encode_segment(segment)
        kept = await machine.store.get_state()
        assert kept is not None and kept.at_record == number + 1, "the record that says that the orchestrator is back"
        assert len(await machine.entries()) < 5
        async with machine.started() as second:
            assert second.state.ledger == first.state.ledger and second.state.members == first.state.members
            found = await discovery(second)
            assert (found.n, found.s) == (1, segment.head), "known from the state alone: the segment is not made again"

    with_machine(story)


def test_the_state_waits_for_the_segments_before_it() -> None:
    async def story(machine: Machine) -> None:
        await machine.write_journal()
        machine.blobs.is_away = True
        async with machine.started() as first:
            await machine.clock.sleep(20.0)
            assert await machine.store.get_state() is None
            assert (await discovery(first)).n == 0, "nobody is sent for what is not there"
        machine.blobs.is_away = False
        async with machine.started():
            assert await machine.store.get_state() is not None
            assert await machine.blobs.size(segment_key(RUN, 0)) is not None

    with_machine(story)


def test_what_was_to_be_deleted_when_the_orchestrator_was_killed_is_deleted_by_the_next() -> None:
    """The state was stored meanwhile, and the events that asked for it are gone from the journal."""

    async def story(machine: Machine) -> None:
        frame = f"runs/{RUN}/e0/frame/m1/f1"
        await machine.blobs.put(frame, b"payload")
        await machine.write_journal()
        machine.blobs.deletes_nothing = True
        async with machine.started() as first:
            await machine.clock.sleep(5.0)
            assert list(first.state.deletions) == [0]
        assert await machine.store.get_state() is not None
        assert await machine.blobs.size(frame) is not None
        machine.blobs.deletes_nothing = False
        async with machine.started() as second:
            await machine.clock.sleep(5.0)
            assert await machine.blobs.size(frame) is None and not second.state.deletions

    with_machine(story)


def test_while_segments_wait_only_the_newest_state_does(caplog: pytest.LogCaptureFixture) -> None:
    """A state weighs 100 MB with 1,000 miners, and the blob store may be away for a night."""
    caplog.set_level("INFO", "strata.orchestrator")

    async def story(machine: Machine) -> None:
        (segment,), kept = machine.run.segments, list[int]()
        keeper = Keeper(
            journal=machine.store,
            blobs=machine.blobs,
            clock=machine.clock,
            on_kept=lambda segment: kept.append(segment.index),
        )
        machine.blobs.is_away = True
        running = asyncio.create_task(keeper.run())
        for index in range(5):
            number = await machine.store.append([b"%d" % index])
            keeper.keep([dataclasses.replace(segment, index=index)], machine.run.state, at_record=number)
            await machine.clock.sleep(1.0)
        machine.blobs.is_away = False
        await machine.clock.sleep(5.0)
        await killed(running)
        assert kept == list(range(5))
        stored = [getattr(record, "at_record", None) for record in caplog.records if record.message == "state stored"]
        assert stored == [1, 5]

    with_machine(story)


def test_a_segment_that_another_journal_made_is_not_taken_for_ones_own() -> None:
    async def story(machine: Machine) -> None:
        await machine.write_journal()
        await machine.blobs.put(segment_key(RUN, 0), b"another segment")
        with pytest.raises(BaseExceptionGroup) as found:
            async with machine.started():
                await machine.clock.sleep(5.0)
        assert found.group_contains(InvariantBroken, match="segment 0 lies in the blob store already")
        assert await machine.blobs.get(segment_key(RUN, 0)) == b"another segment"
        assert await machine.store.get_state() is None

    with_machine(story)


async def refused(machine: Machine, run_id: str = RUN) -> StrataError:
    """Why an orchestrator did not start; nothing may have changed."""
    before, kept = await machine.entries(), await machine.store.get_state()
    with pytest.raises(StrataError) as found:
        async with machine.started(run_id):
            raise AssertionError("it started")
    assert (await machine.entries(), await machine.store.get_state()) == (before, kept)
    return found.value


def test_a_damaged_state_stops_the_start_and_is_left_as_it_is() -> None:
    async def story(machine: Machine) -> None:
        data = bytearray(encode_state(machine.run.state, written_by="0.1.0"))
        data[len(data) // 2] ^= 1
        await machine.store.append([b"record"])
        await machine.store.put_state(StoredState(at_record=1, data=bytes(data)))
        assert isinstance(await refused(machine), DamagedState)

    with_machine(story)


def test_so_does_the_state_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(machine: Machine) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(stored, "VERSION", 0)
            older = encode_state(machine.run.state, written_by="0.0.1")
        await machine.store.append([b"record"])
        await machine.store.put_state(StoredState(at_record=1, data=older))
        assert isinstance(await refused(machine), OtherVersion)

    with_machine(story)


@pytest.mark.parametrize(
    ("entry", "kind", "code"),
    [
        (b'{"event":"Invented","at_s":1.0}', OtherVersion, ExitCode.VERSION_MISMATCH),
        (b'{"event":"Ticked","at_s":1.0,"since":2}', OtherVersion, ExitCode.VERSION_MISMATCH),
        (b'{"event":"Ticked","at_', DamagedState, ExitCode.DAMAGED_STATE),
        (b'{"event":"Tick\xff\xfe","at_s":1.0}', DamagedState, ExitCode.DAMAGED_STATE),
        (b"", DamagedState, ExitCode.DAMAGED_STATE),
    ],
)
def test_a_journal_that_does_not_read_stops_the_start(entry: bytes, kind: type[StrataError], code: ExitCode) -> None:
    async def story(machine: Machine) -> None:
        number = await machine.write_journal()
        await machine.store.append([entry])
        error = await refused(machine)
        assert type(error) is kind and exit_code_of(error) == code
        assert f"entry {number} after record 0" in str(error) and "Nothing was changed" in str(error)

    with_machine(story)


@pytest.mark.parametrize("num_events", [0, 20])
def test_a_store_that_lost_what_is_sealed_is_not_gone_on_from(num_events: int) -> None:
    """An empty one, or an old backup: other facts would be sealed under a number that validators have read already."""

    async def story(machine: Machine) -> None:
        await machine.write_journal()
        async with machine.started() as first:
            assert first.state.ledger.num_segments == 1
        machine.store = MemoryStateStore(machine.clock)
        for event in machine.run.events[:num_events]:
            await machine.store.append([encode_event(event)])
        error = await refused(machine)
        assert isinstance(error, DamagedState) and "segment 0 lies in the blob store already" in str(error)
        assert ("empty" in str(error)) == (num_events == 0)

    with_machine(story)


@pytest.mark.parametrize("has_state", [False, True])
def test_a_store_that_holds_another_run_is_refused(has_state: bool) -> None:
    async def story(machine: Machine) -> None:
        await machine.write_journal()
        if has_state:
            async with machine.started():
                assert await machine.store.get_state() is not None
        error = await refused(machine, "run-2")
        assert exit_code_of(error) == ExitCode.FOREIGN_DIRECTORY and f"holds run {RUN}" in str(error)

    with_machine(story)


def test_what_happened_after_the_state_was_stored_is_added_to_it() -> None:
    async def story(machine: Machine) -> None:
        number = await machine.write_journal()
        before = machine.run.state.ledger.num_entries
        await machine.store.put_state(
            StoredState(at_record=number, data=encode_state(machine.run.state, written_by=""))
        )
        machine.run.ready(*MINERS)
        for event in machine.run.events[number:]:
            await machine.store.append([encode_event(event)])
        assert machine.run.state.ledger.num_entries > before
        async with machine.started() as orchestrator:
            assert orchestrator.state.ledger == machine.run.state.ledger
            assert orchestrator.state.current.roster == machine.run.state.current.roster != ()

    with_machine(story)


def test_a_newer_state_than_ones_own_ends_the_process() -> None:
    """Another orchestrator leads: this one finds out at its next seal, if not at its next append."""

    async def story(machine: Machine) -> None:
        await machine.write_journal()
        machine.blobs.is_away = True
        with pytest.raises(BaseExceptionGroup) as found:
            async with machine.started() as orchestrator:
                newer = StoredState(at_record=10_000, data=encode_state(State(), written_by=""))
                await machine.store.put_state(newer)
                machine.blobs.is_away = False
                await machine.clock.sleep(5.0)
                assert not orchestrator.state.posted
        assert found.group_contains(Superseded, match="another process")

    with_machine(story)
