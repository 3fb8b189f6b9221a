"""Contract of StateStore on memory and on a real Valkey server, kill -9 of the server included."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from subnet.adapters.embedded_store import EmbeddedStore, find_embedded, start_embedded
from subnet.adapters.memory import MemoryStateStore
from subnet.adapters.state import RedisStateStore
from subnet.adapters.system import SystemClock
from subnet.errors import DamagedState, InvalidConfig, InvariantBroken, Superseded, TransientFailure
from subnet.ports import StateStore, StoredState

CLOCK = SystemClock()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    started = start_embedded(tmp_path_factory.mktemp("state"))
    yield started
    started.stop()


@contextlib.asynccontextmanager
async def opened(server: EmbeddedStore, namespace: str) -> AsyncIterator[RedisStateStore]:
    store = RedisStateStore(server.url, namespace)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture(params=["memory", "valkey"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StateStore]:
    if request.param == "memory":
        yield MemoryStateStore(CLOCK)
        return
    started: EmbeddedStore = request.getfixturevalue("server")
    async with opened(started, request.node.name) as valkey:
        yield valkey


async def entries(journal: StateStore, *, after: int = 0) -> list[bytes]:
    return [entry async for entry in journal.read(after=after)]


async def test_the_journal_keeps_every_entry_in_order(store: StateStore) -> None:
    assert await entries(store) == []
    await store.append([b"a", b"\0\xff", b""])
    await store.append([])
    await store.append([b"a"])
    assert await entries(store) == [b"a", b"\0\xff", b"", b"a"]
    await store.append([b"%d" % number for number in range(3000)])
    for number in range(600):
        await store.append([b"single %d" % number])
    found = await entries(store)
    assert found[4:3004] == [b"%d" % number for number in range(3000)]
    assert found[3004:] == [b"single %d" % number for number in range(600)]


async def test_appends_made_at_once_keep_their_order_and_stay_whole(store: StateStore) -> None:
    await asyncio.gather(*(store.append([b"%d-a" % number, b"%d-b" % number]) for number in range(50)))
    assert await entries(store) == [b"%d-%s" % (number, half) for number in range(50) for half in (b"a", b"b")]


async def test_large_entries(store: StateStore) -> None:
    large = [os.urandom(3 << 20), b"x" * (1 << 20)]
    await store.append(large)
    assert await entries(store) == large


# ---- the stored state ----------------------------------------------------------------------------------------------

LARGE = os.urandom((3 << 20) + 5)


async def test_records_are_numbered_from_one(store: StateStore) -> None:
    assert await store.append([]) == 0
    assert [await store.append([b"a", b"b"]), await store.append([b"c"])] == [1, 2]
    assert await entries(store, after=1) == [b"c"]
    assert await entries(store, after=2) == []
    assert await store.append([b"d"]) == 3


@pytest.mark.parametrize("data", [b"", b"small", LARGE], ids=["empty", "small", "large"])
async def test_a_stored_state_takes_the_place_of_the_records_before_it(store: StateStore, data: bytes) -> None:
    assert await store.get_state() is None
    for number in range(5):
        await store.append([b"%d" % number])
    await store.put_state(StoredState(at_record=3, data=data))
    assert await store.get_state() == StoredState(at_record=3, data=data)
    assert await entries(store, after=3) == [b"3", b"4"]
    assert await store.append([b"5"]) == 6
    assert await entries(store, after=3) == [b"3", b"4", b"5"]
    await store.put_state(StoredState(at_record=6, data=b"newer"))
    assert await store.get_state() == StoredState(at_record=6, data=b"newer")
    assert await entries(store, after=6) == []


async def test_who_reads_from_before_the_stored_state_is_told_so(store: StateStore) -> None:
    for number in range(3):
        await store.append([b"%d" % number])
    await store.put_state(StoredState(at_record=2, data=b"2"))
    for after in (0, 1):
        with pytest.raises(TransientFailure, match="begins after record 2"):
            await entries(store, after=after)
    await store.put_state(StoredState(at_record=3, data=b"3"))
    with pytest.raises(TransientFailure, match="begins after record 3"):
        await entries(store, after=2)


async def test_a_journal_that_ends_before_the_stored_state_has_lost_something(store: StateStore) -> None:
    await store.append([b"1"])
    assert await entries(store, after=1) == []
    with pytest.raises(DamagedState):
        await entries(store, after=2)


async def test_a_state_stored_twice_is_stored_once_and_an_older_one_is_not(store: StateStore) -> None:
    for number in range(3):
        await store.append([b"%d" % number])
    for _ in range(2):
        await store.put_state(StoredState(at_record=2, data=b"2"))
    with pytest.raises(Superseded, match="another process"):
        await store.put_state(StoredState(at_record=1, data=b"1"))
    assert await store.get_state() == StoredState(at_record=2, data=b"2")
    assert await entries(store, after=2) == [b"2"]


async def test_appends_go_on_while_a_state_is_stored(store: StateStore) -> None:
    assert await store.append([b"before"]) == 1
    storing = asyncio.create_task(store.put_state(StoredState(at_record=1, data=LARGE)))
    numbers = [await store.append([b"%d" % number]) for number in range(30)]
    await storing
    assert numbers == list(range(2, 32))
    assert await entries(store, after=1) == [b"%d" % number for number in range(30)]


async def test_a_lease_has_one_holder(store: StateStore) -> None:
    assert await store.hold_lease("leader", "one", for_s=60) == "one"
    assert await store.hold_lease("leader", "two", for_s=60) == "one"
    assert await store.hold_lease("leader", "one", for_s=0.05) == "one"
    async with asyncio.timeout(5):
        while await store.hold_lease("leader", "two", for_s=60) != "two":
            await CLOCK.sleep(0.01)
    await store.release_lease("leader", "one")
    assert await store.hold_lease("leader", "one", for_s=60) == "two"
    await store.release_lease("leader", "two")
    assert await store.hold_lease("leader", "one", for_s=60) == "one"
    await store.release_lease("nobody", "one")


# ---- what only a real server can do --------------------------------------------------------------------------------


async def test_what_was_acknowledged_survives_kill_9_and_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subnet.adapters.state._APPEND_S", 0.1)
    first = start_embedded(tmp_path)
    acknowledged = 0
    async with opened(first, "run") as store, asyncio.timeout(20):
        with pytest.raises(TransientFailure):
            while True:
                await store.append([b"%d" % acknowledged])
                acknowledged += 1
                if acknowledged == 200:  # while the next appends are under way
                    asyncio.get_running_loop().call_later(0.01, os.kill, first.pid, signal.SIGKILL)
    first.stop()
    second = start_embedded(tmp_path)
    assert second.pid != first.pid
    async with opened(second, "run") as store:
        found = await entries(store)
        assert found == [b"%d" % number for number in range(len(found))]
        assert len(found) - acknowledged in (0, 1)
        await store.append([b"next"])
    second.stop()


async def test_an_append_waits_for_a_server_that_stands_still(tmp_path: Path) -> None:
    first = start_embedded(tmp_path)
    async with opened(first, "run") as store:
        await store.append([b"before"])
        os.kill(first.pid, signal.SIGSTOP)
        appending = asyncio.create_task(store.append([b"during"]))
        await CLOCK.sleep(0)
        os.kill(first.pid, signal.SIGCONT)
        await appending
        assert await entries(store) == [b"before", b"during"]
    first.stop()


async def test_an_append_whose_answer_was_lost_is_not_written_twice(server: EmbeddedStore) -> None:
    async with opened(server, "lost") as one, opened(server, "lost") as same:
        assert await entries(one) == await entries(same) == []
        await one.append([b"a", b"b"])
        await same.append([b"a", b"b"])
        assert await entries(one) == [b"a", b"b"]


async def test_a_second_writer_of_one_journal_stops(server: EmbeddedStore) -> None:
    async with opened(server, "two") as one, opened(server, "two") as two:
        assert await entries(one) == await entries(two) == []
        await one.append([b"one"])
        with pytest.raises(Superseded, match="another process"):
            await two.append([b"two"])
        assert await entries(one) == [b"one"]


async def test_a_second_writer_is_found_after_a_trim_too(server: EmbeddedStore) -> None:
    """The number it would write next was used and trimmed, and the journal may be empty."""
    async with opened(server, "trimmed") as one, opened(server, "trimmed") as two:
        assert await one.append([b"one"]) == 1
        assert await entries(two) == [b"one"]
        assert await one.append([b"two"]) == 2
        await one.put_state(StoredState(at_record=2, data=b""))
        with pytest.raises(Superseded, match="another process"):
            await two.append([b"late"])
        with pytest.raises(Superseded, match="another process"):
            await two.put_state(StoredState(at_record=1, data=b"late"))
        assert await one.append([b"three"]) == 3
        assert await entries(one, after=2) == [b"three"]


@pytest.mark.parametrize("has_read", [False, True])
async def test_numbers_go_on_where_everything_was_trimmed(server: EmbeddedStore, has_read: bool) -> None:
    namespace = f"empty-{has_read}"
    async with opened(server, namespace) as before:
        for number in range(7):
            await before.append([b"%d" % number])
        await before.put_state(StoredState(at_record=7, data=b"all"))
    async with opened(server, namespace) as after:
        if has_read:
            assert await entries(after, after=7) == []
        assert await after.append([b"next"]) == 8


async def test_numbers_go_on_when_the_server_was_killed_with_everything_trimmed(tmp_path: Path) -> None:
    first = start_embedded(tmp_path)
    async with opened(first, "run") as store:
        await store.append([b"a"])
        await store.append([b"b"])
        await store.put_state(StoredState(at_record=2, data=LARGE))
        os.kill(first.pid, signal.SIGKILL)
    first.stop()
    second = start_embedded(tmp_path)
    async with opened(second, "run") as store, opened(second, "run") as late:
        late._next_id = 2
        assert await store.get_state() == StoredState(at_record=2, data=LARGE)
        assert await entries(store, after=2) == []
        with pytest.raises(Superseded, match="another process"):
            await late.append([b"another b"])
        assert await store.append([b"c"]) == 3
    second.stop()


@pytest.mark.parametrize("num_commands", range(5))
async def test_a_process_killed_while_it_stores_leaves_the_old_state(
    server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, num_commands: int
) -> None:
    """It sends three pieces and then the script that puts them in place: whatever came last, one state is whole."""
    namespace = f"killed-{num_commands}"
    async with opened(server, namespace) as store:
        for number in range(3):
            await store.append([b"%d" % number])
        await store.put_state(StoredState(at_record=1, data=b"old"))
        sent = 0
        plain = store._redis.execute_command, store._redis.pipeline

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def send(*arguments: Any, **options: Any) -> Any:
                nonlocal sent
                sent += 1
                if sent > num_commands:
                    raise asyncio.CancelledError  # as good as the end of the process: nothing more is sent
                return call(*arguments, **options)

            return send

        monkeypatch.setattr(store._redis, "execute_command", counted(plain[0]))
        monkeypatch.setattr(store._redis, "pipeline", counted(plain[1]))
        with contextlib.suppress(asyncio.CancelledError):
            await store.put_state(StoredState(at_record=3, data=LARGE[: (1 << 20) + 1]))
    async with opened(server, namespace) as again:
        is_new = num_commands >= 4
        found = await again.get_state()
        assert found is not None
        assert found == StoredState(at_record=3, data=LARGE[: (1 << 20) + 1]) if is_new else found.data == b"old"
        assert await entries(again, after=found.at_record) == ([] if is_new else [b"1", b"2"])
        assert await again.append([b"3"]) == 4
        await again.put_state(StoredState(at_record=4, data=b"next"))
        left = [key async for key in again._redis.scan_iter(f"{namespace}:state:*")]
        lives_ms = [await again._redis.pttl(key) for key in left]
        assert all(0 < life_ms <= 600_000 for life_ms in lives_ms), "pieces without a place are forgotten"
        assert len(lives_ms) == (0 < num_commands < 4)


async def test_a_new_state_over_a_journal_that_was_not_trimmed_is_read_as_well(server: EmbeddedStore) -> None:
    async with opened(server, "overlap") as store:
        for number in range(4):
            await store.append([b"%d" % number])
        await store._redis.rpush("overlap:state", b"2", b"state")
        assert await store.get_state() == StoredState(at_record=2, data=b"state")
        assert await entries(store, after=2) == [b"2", b"3"]
        await store.put_state(StoredState(at_record=3, data=b"next"))
        assert await store._redis.xlen("overlap:journal") == 1


async def test_pieces_that_went_missing_put_no_state_in_place(
    server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server, "missing") as store:
        await store.append([b"a"])
        monkeypatch.setattr("subnet.adapters.state._PIECES_LIVE_MS", 0)
        with pytest.raises(TransientFailure, match="pieces of the state are missing"):
            await store.put_state(StoredState(at_record=1, data=b"state"))
        assert await store.get_state() is None
        assert await entries(store) == [b"a"]


async def test_a_state_replaced_while_it_is_read_is_read_again(
    server: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server, "replaced") as store, opened(server, "replaced") as other:
        for number in range(2):
            await store.append([b"%d" % number])
        await store.put_state(StoredState(at_record=1, data=LARGE))
        plain = store._piece

        async def piece(place: int) -> bytes:
            if place == 2:
                await other.put_state(StoredState(at_record=2, data=b"short"))
            return await plain(place)

        monkeypatch.setattr(store, "_piece", piece)
        with pytest.raises(TransientFailure, match="replaced while it was read"):
            await store.get_state()
        monkeypatch.undo()
        assert await store.get_state() == StoredState(at_record=2, data=b"short")


async def test_a_journal_trimmed_while_it_is_read_is_no_gap(server: EmbeddedStore) -> None:
    async with opened(server, "racing") as store, opened(server, "racing") as other:
        for number in range(300):
            await store.append([b"%d" % number])
        reading = store.read()
        assert await anext(reading) == b"0"
        await other.put_state(StoredState(at_record=300, data=b""))
        with pytest.raises(TransientFailure, match="read the stored state again"):
            [entry async for entry in reading]


async def test_a_gap_in_the_journal_is_found(server: EmbeddedStore) -> None:
    async with opened(server, "gap") as store:
        for number in range(3):
            await store.append([b"%d" % number])
        await store._redis.xdel("gap:journal", "2-0")
        with pytest.raises(InvariantBroken, match="lacks record 2"):
            await entries(store)


async def test_a_journal_that_is_gone_is_not_gone_on_from(server: EmbeddedStore) -> None:
    """As a server leaves it that drops keys, or somebody who deletes some."""
    async with opened(server, "gone") as store, opened(server, "gone") as after:
        for number in range(3):
            await store.append([b"%d" % number])
        await store.put_state(StoredState(at_record=2, data=b"state"))
        await store._redis.delete("gone:journal")
        with pytest.raises(DamagedState, match="as of record 2, and journal gone:journal ends with record 0"):
            await entries(after, after=2)


async def test_a_state_without_its_number_is_damaged(server: EmbeddedStore) -> None:
    async with opened(server, "number") as store:
        await store.append([b"a"])
        await store.put_state(StoredState(at_record=1, data=b"state"))
        await store._redis.lset("number:state", 0, "1x")
        for call in (store.get_state(), entries(store, after=1)):
            with pytest.raises(DamagedState, match="number of a record"):
                await call


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [("maxmemory-policy", "allkeys-lru", "noeviction"), ("appendonly", "no", "appendonly yes")],
    ids=["drops keys", "keeps nothing"],
)
async def test_a_server_that_may_lose_what_it_took_is_refused(
    tmp_path: Path, name: str, value: str, remedy: str
) -> None:
    server = start_embedded(tmp_path)
    async with opened(server, "run") as store:
        await store._redis.config_set(name, value)
        with pytest.raises(InvalidConfig, match=remedy):
            await store.append([b"a"])
    server.stop()


async def test_a_server_that_flushes_now_and_then_is_waited_for(tmp_path: Path) -> None:
    server = start_embedded(tmp_path)
    async with opened(server, "run") as store:
        await store._redis.config_set("appendfsync", "everysec")
        await store.append([b"a"])
        info = await store._redis.info("persistence")
        assert info["aof_pending_bio_fsync"] == 0
        assert await entries(store) == [b"a"]
    server.stop()


async def test_a_server_that_is_gone_is_transient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.adapters.state._APPEND_S", 0.2)
    server = start_embedded(tmp_path)
    async with opened(server, "run") as store:
        await store.append([b"a"])
        server.stop()
        for call in (
            store.append([b"b"]),
            entries(store),
            store.put_state(StoredState(at_record=1, data=b"")),
            store.get_state(),
            store.hold_lease("l", "h", for_s=1),
            store.release_lease("l", "h"),
        ):
            with pytest.raises(TransientFailure, match="state store"):
                await call
    server.stop()


def test_a_server_left_by_a_killed_process_is_used_again(tmp_path: Path) -> None:
    first = start_embedded(tmp_path)
    second = start_embedded(tmp_path)
    assert (second.pid, second.url) == (first.pid, first.url)
    found = find_embedded(tmp_path)
    assert found is not None
    assert found.pid == first.pid
    assert oct((tmp_path / "server.json").stat().st_mode & 0o777) == "0o600"
    found_again = EmbeddedStore(url=second.url, pid=second.pid)
    os.kill(first.pid, signal.SIGTERM)
    first.stop()
    found_again.stop()
    assert find_embedded(tmp_path) is None


def test_a_record_of_another_process_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text(f'{{"pid":{os.getpid()},"port":9,"password":"x"}}')
    server = start_embedded(tmp_path)
    assert server.pid != os.getpid()
    server.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subnet.adapters.embedded_store._SETTINGS", "no-such-setting yes\n")
    began = time.monotonic()
    with pytest.raises(TransientFailure, match="does not start"):
        start_embedded(tmp_path)
    assert time.monotonic() - began < 10
