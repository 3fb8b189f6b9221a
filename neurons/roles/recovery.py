"""What an orchestrator starts from: the state that was stored last and the journal after it, or why it must not start.

Nothing is written here: whoever is refused finds everything as it was.
"""

from dataclasses import dataclass

import msgspec

from neurons.exit_codes import ExitCode
from neurons.roles.ports import OrchestratorPorts
from subnet.config import RunConfig
from subnet.errors import DamagedState, OtherVersion, StartupRefused
from subnet.orchestration import machine
from subnet.orchestration.events import AnyEvent, Created, StoreSegment, decode_event
from subnet.orchestration.ledger import Segment
from subnet.orchestration.segments import segment_key
from subnet.orchestration.state import State
from subnet.orchestration.stored import decode_state
from subnet.types import Digest


@dataclass(frozen=True, slots=True)
class Recovered:
    """The run as it was left. `num_events` were replayed after the state as of `at_record`, 0 when there was none."""

    state: State
    segments: list[Segment]
    """Sealed by the replayed events: they may not lie in the blob store yet."""
    num_kept: int
    """Segments sealed before, which do; the ledger's head after them is `kept_head`."""
    kept_head: Digest
    at_record: int
    num_events: int


async def recover(config: RunConfig, ports: OrchestratorPorts, run_id: str) -> Recovered:
    """Raises StartupRefused (the store holds another run), DamagedState, OtherVersion, InvariantBroken, TransientFailure."""
    stored = await ports.store.get_state()
    state = decode_state(stored.data) if stored is not None else State()
    at_record = stored.at_record if stored is not None else 0
    _refuse_other_run(state.run_id, run_id)
    num_kept, kept_head = state.ledger.num_segments, state.ledger.sealed_head
    segments, num_events = list[Segment](), 0
    async for entry in ports.store.read(after=at_record):
        event = _decoded(entry, f"entry {num_events} after record {at_record}")
        if isinstance(event, Created):
            _refuse_other_run(event.run_id, run_id)
        effects = machine.step(state, event, config)
        segments += [effect.segment for effect in effects if isinstance(effect, StoreSegment)]
        num_events += 1
    await _refuse_older_than_the_record(state, ports, run_id)
    return Recovered(
        state=state,
        segments=segments,
        num_kept=num_kept,
        kept_head=kept_head,
        at_record=at_record,
        num_events=num_events,
    )


def _refuse_other_run(found: str, ours: str) -> None:
    if found not in ("", ours):
        raise StartupRefused(
            f"the state store holds run {found}, and this is run {ours}; nothing was changed. Name another store with "
            "--state-url, or empty this one if that run is over.",
            ExitCode.FOREIGN_DIRECTORY,
        )


def _decoded(entry: bytes, place: str) -> AnyEvent:
    try:
        return decode_event(entry)
    except msgspec.ValidationError as error:
        raise OtherVersion(
            f"{place} of the journal does not fit this software: {error}. Nothing was changed.\n"
            "Start the version of Strata that wrote it, which is the one that ran last."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedState(
            f"{place} of the journal is damaged: {error}. Nothing was changed.\n"
            "Restore the state store from a backup, or point --state-url at its replica."
        ) from error


async def _refuse_older_than_the_record(state: State, ports: OrchestratorPorts, run_id: str) -> None:
    """An event that seals a segment is journaled before the segment is stored: a state that lacks one is not the newest.

    To go on from it would be to seal other facts under the same number, after validators have paid for the first.
    """
    num_segments = state.ledger.num_segments
    if await ports.blobs.size(segment_key(run_id, num_segments)) is not None:
        raise DamagedState(
            f"the state store is {'empty' if not state.run_id else 'older than the record'}: it knows of {num_segments} sealed "
            f"segments, and segment {num_segments} lies in the blob store already. Nothing was changed.\n"
            "Restore the newest backup of the state store, or point --state-url at its replica; where neither is left, the run "
            "is over: begin another with strata init-run."
        )
