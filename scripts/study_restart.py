"""How long does an orchestrator take to start after some epochs, and how much does its journal hold? With the journal alone, and
with the state stored at each seal.

    python scripts/study_restart.py --miners 1000 --stages 8 --batches 32 --epochs 4

The events of study_scale, written to a real state store in records of 64. A start from a stored state is measured right before
the next one is stored, when there is most to replay, and right after.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benches.measure import run_loop
from study_scale import Crowd, crowd_of

from subnet.adapters.embedded_store import start_embedded
from subnet.adapters.state import RedisStateStore
from subnet.orchestration import machine
from subnet.orchestration.events import decode_event
from subnet.orchestration.state import State
from subnet.orchestration.stored import decode_state, encode_state
from subnet.ports import StoredState

EVENTS_A_RECORD = 64


async def _append(store: RedisStateStore, events: list[bytes]) -> int:
    at_record = 0
    for start in range(0, len(events), EVENTS_A_RECORD):
        at_record = await store.append(events[start : start + EVENTS_A_RECORD])
    return at_record


async def _start(store: RedisStateStore, crowd: Crowd) -> str:
    """Rebuild the state as an orchestrator does; the CPU time that took, and what lies in the store."""
    began, num_events = time.process_time(), 0
    stored = await store.get_state()
    state = State() if stored is None else decode_state(stored.data)
    async for entry in store.read(after=stored.at_record if stored else 0):
        machine.step(state, decode_event(entry), crowd.config)
        num_events += 1
    took_s = time.process_time() - began
    assert state == crowd.state
    keys = (f"{store._namespace}:{key}" for key in ("journal", "state"))
    journal_mb, state_mb = [(await store._redis.memory_usage(key, samples=0) or 0) / 1e6 for key in keys]
    return f"{took_s:6.2f} s of CPU, {num_events:>7,} events; journal {journal_mb:6.1f} MB, state {state_mb:5.1f} MB"


async def _measure(directory: Path, crowd: Crowd, batches: int, num_epochs: int) -> None:
    embedded = start_embedded(directory)
    alone, kept = (RedisStateStore(embedded.url, name) for name in ("alone", "kept"))
    try:
        crowd.gather()
        for epoch in range(num_epochs):
            crowd.epoch(batches)
            events, crowd.journal = crowd.journal or [], []
            await _append(alone, events)
            at_record = await _append(kept, events)
            sys.stdout.write(f"epoch {epoch} sealed\n  journal alone          {await _start(alone, crowd)}\n")
            sys.stdout.write(f"  with the state before  {await _start(kept, crowd)}\n")
            await kept.put_state(StoredState(at_record=at_record, data=encode_state(crowd.state, written_by="")))
            sys.stdout.write(f"  with the state of now  {await _start(kept, crowd)}\n")
            sys.stdout.flush()
            crowd.audit()
    finally:
        await alone.close()
        await kept.close()
        embedded.stop()


def main() -> None:
    """Measure after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--miners", type=int, default=1000)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--batches", type=int, default=32, help="samples an epoch asks of each miner")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    crowd = crowd_of(arguments.miners, arguments.stages, arguments.batches)
    crowd.journal = []
    with tempfile.TemporaryDirectory() as directory:
        run_loop(_measure(Path(directory), crowd, arguments.batches, arguments.epochs))


if __name__ == "__main__":
    main()
