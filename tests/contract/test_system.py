"""Contracts of Clock, Compute and Disk on memory and on the machine."""

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from subnet.adapters.memory import InlineCompute, ManualClock, MemoryDisk
from subnet.adapters.system import DirectoryDisk, SystemClock, ThreadCompute
from subnet.ports import Clock, Compute, Disk


@pytest.fixture(params=[ManualClock, SystemClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


@pytest.fixture(params=["inline", "thread"])
def compute(request: pytest.FixtureRequest) -> Iterator[Compute]:
    if request.param == "inline":
        yield InlineCompute()
        return
    worker = ThreadCompute()
    yield worker
    worker.close()


@pytest.fixture(params=["memory", "directory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    return MemoryDisk() if request.param == "memory" else DirectoryDisk(tmp_path / "role")


async def test_sleeping_moves_the_clock(clock: Clock) -> None:
    before = clock.now()
    await clock.sleep(0.01)
    await clock.sleep(-1)
    assert clock.now() - before >= 0.0099


async def test_work_runs_one_at_a_time_in_the_order_asked(compute: Compute) -> None:
    done: list[int] = []
    running = threading.Lock()

    def work(index: int) -> int:
        assert running.acquire(blocking=False)
        done.append(index)
        running.release()
        return index * index

    results = await asyncio.gather(*(compute.run(lambda index=index: work(index)) for index in range(20)))  # type: ignore[misc]
    assert results == [index * index for index in range(20)]
    assert done == list(range(20))


async def test_an_error_of_the_work_reaches_the_caller_and_the_next_call_runs(compute: Compute) -> None:
    with pytest.raises(ZeroDivisionError):
        await compute.run(lambda: 1 // 0)
    assert await compute.run(lambda: "next") == "next"


async def test_disk_reads_what_it_wrote(disk: Disk) -> None:
    assert await disk.read("checkpoint-1") is None
    await disk.write("checkpoint-1", b"one")
    await disk.write("epoch-2/segment.bin", b"two")
    await disk.write("checkpoint-1", b"three")
    assert await disk.read("checkpoint-1") == b"three"
    assert await disk.names() == ["checkpoint-1", "epoch-2/segment.bin"]
    await disk.delete("checkpoint-1")
    await disk.delete("checkpoint-1")
    assert await disk.names() == ["epoch-2/segment.bin"]


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc/passwd", "a/../b", ".hidden", "a//b", "a\0b", "a\\b", "a/", "x" * 600]
)
async def test_disk_refuses_names_that_lead_elsewhere(disk: Disk, name: str) -> None:
    for call in (disk.read(name), disk.write(name, b""), disk.delete(name)):
        with pytest.raises(ValueError, match="is not a name"):
            await call


def dead_pid() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


def left_overs(directory: Path) -> set[str]:
    return {path.name for path in directory.glob(".*")}


async def test_half_written_files_are_no_files_and_go_once_their_writer_is_dead(tmp_path: Path) -> None:
    names = [f".tmp-{pid}-0123" for pid in (dead_pid(), os.getpid(), 1, "x", "9" * 40)]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    disk = DirectoryDisk(tmp_path)
    await disk.write("kept", b"1")
    assert await disk.names() == ["kept"]
    assert left_overs(tmp_path) == set(names[1:3])
