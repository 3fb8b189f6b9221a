"""Two orchestrators of one run, one real state store: one leads, the other takes over, and a late writer is found."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from neurons.leader import Leadership
from subnet.adapters.embedded_store import EmbeddedStore, start_embedded
from subnet.adapters.memory import ManualClock, MemoryStateStore
from subnet.adapters.state import RedisStateStore
from subnet.adapters.system import SystemClock
from subnet.errors import Superseded, TransientFailure
from subnet.ports import StoredState

CLOCK = SystemClock()
LEASE_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    started = start_embedded(tmp_path_factory.mktemp("state"))
    yield started
    started.stop()


@pytest.fixture
async def stores(server: EmbeddedStore, request: pytest.FixtureRequest) -> AsyncIterator[list[RedisStateStore]]:
    """Two connections to one run's state."""
    opened = [RedisStateStore(server.url, request.node.name) for _ in range(2)]
    yield opened
    for store in opened:
        await store.close()


def candidate(store: RedisStateStore, holder: str, lease_s: float = LEASE_S) -> Leadership:
    return Leadership(store, CLOCK, holder=holder, lease_s=lease_s)


async def test_the_second_waits_is_told_for_whom_and_leads_at_once_when_the_first_gives_up(
    stores: list[RedisStateStore],
) -> None:
    first, second = (
        candidate(store, holder, 4.0) for store, holder in zip(stores, ("a:/data", "b:/data"), strict=True)
    )
    told: list[str] = []
    await first.take(told.append)
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.take(told.append))
    await CLOCK.sleep(1.5)
    assert not waiting.done() and told == ["a:/data"]
    keeping.cancel()
    await first.give_up()
    async with asyncio.timeout(2.5):  # the lease was renewed less than a second ago
        await waiting


async def test_a_leader_that_is_gone_is_replaced_and_learns_of_it(stores: list[RedisStateStore]) -> None:
    first, second = (candidate(store, holder) for store, holder in zip(stores, ("a", "b"), strict=True))
    await first.take(pytest.fail)
    await stores[0].append([b"one"])
    async with asyncio.timeout(10 * LEASE_S):
        await second.take(lambda leader: None)
    assert [entry async for entry in stores[1].read()] == [b"one"]
    await stores[1].append([b"two"])
    with pytest.raises(Superseded, match="b leads this run now"):
        await first.keep()
    with pytest.raises(Superseded, match="another process"):
        await stores[0].append([b"a late one"])
    await first.give_up()
    await second.take(pytest.fail)


async def test_a_stand_by_takes_over_from_the_state_that_the_leader_stored(stores: list[RedisStateStore]) -> None:
    first, second = (candidate(store, holder) for store, holder in zip(stores, ("a", "b"), strict=True))
    await first.take(pytest.fail)
    for entry in (b"one", b"two", b"three"):
        await stores[0].append([entry])
    await stores[0].put_state(StoredState(at_record=2, data=b"one and two"))
    async with asyncio.timeout(10 * LEASE_S):
        await second.take(lambda leader: None)
    found = await stores[1].get_state()
    assert found == StoredState(at_record=2, data=b"one and two")
    assert [entry async for entry in stores[1].read(after=2)] == [b"three"]
    assert await stores[1].append([b"four"]) == 4
    await stores[1].put_state(StoredState(at_record=4, data=b"all"))
    with pytest.raises(Superseded, match="another process"):
        await stores[0].append([b"a late one"])
    with pytest.raises(Superseded, match="another process"):
        await stores[0].put_state(StoredState(at_record=3, data=b"a late one"))
    assert await stores[1].get_state() == StoredState(at_record=4, data=b"all")


async def test_a_leader_that_was_paused_knows_without_asking_that_it_may_lead_no_more() -> None:
    clock = ManualClock()
    store = MemoryStateStore(clock)
    leader = Leadership(store, clock, holder="a", lease_s=4.0)
    assert not leader.may_lead()
    await leader.take(pytest.fail)
    await clock.sleep(3.9)
    assert leader.may_lead()
    await clock.sleep(0.1)
    assert not leader.may_lead(), "as on waking up after any pause that is longer"
    await leader.take(pytest.fail)
    assert leader.may_lead(), "nobody took its place meanwhile"


async def test_started_again_in_its_place_it_goes_on_without_waiting(stores: list[RedisStateStore]) -> None:
    await candidate(stores[0], "a:/data").take(pytest.fail)
    await candidate(stores[1], "a:/data").take(pytest.fail)


async def test_a_store_that_is_away_for_a_moment_costs_nothing_for_a_whole_lease_the_lead(
    server: EmbeddedStore, stores: list[RedisStateStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subnet.adapters.state._EXCHANGE_S", LEASE_S / 4)
    leader = candidate(stores[0], "a")
    await leader.take(pytest.fail)
    keeping = asyncio.create_task(leader.keep())
    os.kill(server.pid, signal.SIGSTOP)
    await CLOCK.sleep(LEASE_S / 2)
    os.kill(server.pid, signal.SIGCONT)
    await CLOCK.sleep(2 * LEASE_S)
    assert not keeping.done()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            with pytest.raises(TransientFailure, match="state store"):
                await keeping
    finally:
        os.kill(server.pid, signal.SIGCONT)
