"""Journal append: what an acknowledged event waits for, against one write and fsync of the same bytes on the same disk."""

import os
import tempfile
import time
from pathlib import Path

from benches.measure import Line, fact, limit, median, percentile, run_loop
from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.state import RedisStateStore

_ENTRY = b"x" * 1500
"""About an event with four receipts."""
_BATCH = 64


async def _measure(directory: Path, repeats: int) -> list[Line]:
    embedded = start_embedded(directory / "state")
    store = RedisStateStore(embedded.url, "bench")
    times: dict[str, list[float]] = {"append": [], "batch": [], "fsync": [], "nonce": []}
    try:
        with (directory / "plain").open("ab", buffering=0) as file:
            for number in range(repeats + 5):
                began = time.perf_counter()
                await store.append([_ENTRY])
                times["append"].append(time.perf_counter() - began)
                began = time.perf_counter()
                await store.append([_ENTRY] * _BATCH)
                times["batch"].append(time.perf_counter() - began)
                began = time.perf_counter()
                await store.remember_once(f"nonce:{number}", for_s=13.0)
                times["nonce"].append(time.perf_counter() - began)
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
        fact("a nonce remembered, flushed", f"{middle['nonce']:.2f} ms"),
    ]


def bench(scale: float) -> list[Line]:
    """One event, a full group commit, a nonce, and the disk, in turns."""
    with tempfile.TemporaryDirectory() as directory:
        found: list[Line] = run_loop(_measure(Path(directory), max(20, round(200 * scale))))
    return found
