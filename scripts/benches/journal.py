"""Journal: what an acknowledged event waits for, against one write and fsync of the same bytes on the same disk, and
while a state is stored and the journal trimmed.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path

from benches.measure import Line, fact, limit, median, percentile, run_loop
from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.state import RedisStateStore
from subnet.ports import StoredState

_ENTRY = b"x" * 1500
"""About an event with four receipts."""
_BATCH = 64
_STATE_BYTES = 10_000_000
"""About the state of a thousand miners at a seal."""
_RECORDS_A_SCALE = 1000
"""Full group commits of one epoch: 64,000 events, 96 MB."""


async def _measure(directory: Path, repeats: int) -> list[Line]:
    embedded = start_embedded(directory / "state")
    store = RedisStateStore(embedded.url, "bench")
    times: dict[str, list[float]] = {"append": [], "batch": [], "fsync": []}
    try:
        with (directory / "plain").open("ab", buffering=0) as file:
            for _ in range(repeats + 5):
                began = time.perf_counter()
                await store.append([_ENTRY])
                times["append"].append(time.perf_counter() - began)
                began = time.perf_counter()
                await store.append([_ENTRY] * _BATCH)
                times["batch"].append(time.perf_counter() - began)
                began = time.perf_counter()
                file.write(_ENTRY)
                os.fsync(file.fileno())
                times["fsync"].append(time.perf_counter() - began)
    finally:
        await store.close()
        embedded.stop()
    warm = {name: found[5:] for name, found in times.items()}
    middle = {name: 1e3 * median(found) for name, found in warm.items()}
    return [
        limit("append of one event, flushed / write and fsync of as many bytes", middle["append"] / middle["fsync"], 3),
        fact(
            "median (p99)",
            f"append {middle['append']:.2f} ({1e3 * percentile(warm['append'], 99):.1f}) ms, fsync "
            f"{middle['fsync']:.2f} ({1e3 * percentile(warm['fsync'], 99):.1f}) ms",
        ),
        fact(
            f"{_BATCH} events in one append", f"{middle['batch']:.2f} ms = {1e3 * middle['batch'] / _BATCH:.0f} us each"
        ),
    ]


async def _measure_storing(directory: Path, num_records: int) -> list[Line]:
    embedded = start_embedded(directory / "trimmed")
    store = RedisStateStore(embedded.url, "bench")
    times: list[float] = []
    try:
        for _ in range(num_records):
            at_record = await store.append([_ENTRY] * _BATCH)
        began = time.perf_counter()
        storing = asyncio.create_task(store.put_state(StoredState(at_record=at_record, data=os.urandom(_STATE_BYTES))))
        while not storing.done():
            asked = time.perf_counter()
            await store.append([_ENTRY])
            times.append(time.perf_counter() - asked)
        await storing
        stored_s = time.perf_counter() - began
        began = time.perf_counter()
        assert await store.get_state() is not None
        read_s = time.perf_counter() - began
    finally:
        await store.close()
        embedded.stop()
    return [
        fact(
            f"a state of {_STATE_BYTES / 1e6:.0f} MB stored, {num_records * _BATCH:,} events trimmed",
            f"{1e3 * stored_s:.0f} ms; read {1e3 * read_s:.0f} ms",
        ),
        fact(
            "appends meanwhile", f"{len(times)}, median {1e3 * median(times):.1f} ms, longest {1e3 * max(times):.0f} ms"
        ),
    ]


def bench(scale: float) -> list[Line]:
    """One event, a full group commit, and the disk, in turns; then a state in the place of an epoch's journal."""
    with tempfile.TemporaryDirectory() as directory:
        found: list[Line] = run_loop(_measure(Path(directory), max(20, round(200 * scale))))
        found += run_loop(_measure_storing(Path(directory), max(20, round(_RECORDS_A_SCALE * scale))))
    return found
