"""When an epoch may begin, and when its training and its commitments are over: by who is done, and by the clock at the latest.

Lanes that can work do not wait for one that cannot (papers.md B3); a pipeline is one lane.
"""

from subnet.lanes import lanes
from subnet.orchestration.state import State, Turn
from subnet.types import Hotkey, Phase


def is_late(turn: Turn) -> bool:
    """Whether the phase's deadline has passed."""
    return turn.now_s >= turn.state.phase_deadline_s


def roster(turn: Turn) -> tuple[tuple[Hotkey, ...], ...]:
    """Who works in the epoch that may begin now, by stage: every ready miner of every lane or, when it is late, of those lanes
    that can work at all. Empty while it has to wait.
    """
    state = turn.state
    if not _is_everybody_ready(turn) and not is_late(turn):
        return ()
    ready = tuple(
        tuple(hotkey for hotkey in state.live_members(stage) if state.members[hotkey].ready_epoch == state.epoch)
        for stage in range(turn.config.training.num_stages)
    )
    can_work = [all(ready[stage] for stage in lane) for lane in lanes(turn.config)]
    return ready if all(can_work) or (is_late(turn) and any(can_work)) else ()


def _is_everybody_ready(turn: Turn) -> bool:
    """Every live miner holds the epoch's params; the first epoch waits for as many miners and validators as the run says."""
    state, training = turn.state, turn.config.training
    live = (member for member in state.members.values() if member.is_live and member.banned_until < state.epoch)
    if state.phase is Phase.GATHERING:
        num_ready = sum(member.ready_epoch == state.epoch for member in live)
        return num_ready >= training.min_miners and len(state.live_validators) >= training.min_validators
    return all(member.ready_epoch == state.epoch for member in live)


def training_is_over(turn: Turn) -> bool:
    """Every lane that still has a miner in each stage has done what was asked of it, or time is up."""
    state = turn.state
    if is_late(turn):
        return True
    live = [state.live_roster(stage) for stage in range(len(state.current.roster))]
    working = [lane for lane in lanes(turn.config) if all(live[stage] for stage in lane)]
    return bool(working) and all(_has_quorum(turn, live[stage]) for lane in working for stage in lane)


def _has_quorum(turn: Turn, live: list[Hotkey]) -> bool:
    training = turn.config.training
    done = [hotkey for hotkey in live if _num_credited(turn.state, hotkey) >= training.target_batches]
    return len(done) >= training.quorum * len(live)


def _num_credited(state: State, hotkey: Hotkey) -> int:
    work_done = state.current.work.get(hotkey)
    return len(work_done.credited) if work_done else 0


def commits_are_in(turn: Turn) -> bool:
    """Everybody of the roster who is still at work has committed, or time is up."""
    state, current = turn.state, turn.state.current
    if is_late(turn):
        return True
    return all(
        hotkey in current.commits or not state.is_at_work(hotkey, stage)
        for stage, miners in enumerate(current.roster)
        for hotkey in miners
    )
