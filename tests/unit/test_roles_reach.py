"""When a peer that cannot be dialled is tried again."""

from neurons.roles.reach import FIRST_PAUSE_S, LONGEST_PAUSE_S, Reach
from subnet.types import Hotkey

PEER, OTHER = Hotkey("peer"), Hotkey("other")


def test_a_peer_is_open_until_it_fails_and_again_once_it_answers() -> None:
    reach = Reach()
    assert reach.is_open(PEER)
    reach.failed(PEER, now=0.0)
    assert not reach.is_open(PEER) and reach.is_open(OTHER)
    reach.answered(PEER)
    assert reach.is_open(PEER) and not reach.is_look_due(PEER, now=100.0)


def test_one_frame_looks_when_a_look_is_due_and_later_after_each_one_in_vain() -> None:
    reach, now, pauses = Reach(), 0.0, []
    reach.failed(PEER, now=now)
    for _ in range(6):
        before = now
        while not reach.is_look_due(PEER, now=now):
            now += 0.5
        assert not reach.is_look_due(PEER, now=now), "one frame is enough"
        pauses.append(now - before)
        reach.failed_again(PEER, now=now)
    assert pauses == [FIRST_PAUSE_S, 10.0, 20.0, 40.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_frames_that_were_under_way_together_are_one_failure() -> None:
    reach = Reach()
    for now in (0.0, 0.1, 0.2):
        reach.failed(PEER, now=now)
    assert reach.is_look_due(PEER, now=FIRST_PAUSE_S)
    reach.failed_again(OTHER, now=0.0)  # it answered somebody else meanwhile
    assert reach.is_open(OTHER)
