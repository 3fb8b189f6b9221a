"""Pathways: anyone can repeat them, and nobody chooses its partners (trust.md 1.2, 4)."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from subnet.orchestration import pathways
from subnet.types import Epoch, Hotkey, SampleId, StageIndex

rosters = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda sizes: tuple(tuple(Hotkey(f"s{stage}m{place}") for place in range(size)) for stage, size in enumerate(sizes))
)


@given(rosters, st.integers(0, 500), st.text(max_size=5))
def test_a_pathway_has_one_miner_of_each_stage(roster: tuple[tuple[Hotkey, ...], ...], turn: int, beacon: str) -> None:
    found = pathways.pathway(roster, range(len(roster)), beacon=beacon, epoch=Epoch(1), turn=turn)
    assert all(hotkey in stage for hotkey, stage in zip(found, roster, strict=True))


@given(st.integers(1, 7), st.integers(0, 40), st.text(max_size=5))
def test_every_miner_of_a_stage_gets_one_sample_of_each_round(size: int, cycle: int, beacon: str) -> None:
    miners = tuple(Hotkey(f"m{place}") for place in range(size))
    roster, lane = (miners, miners), range(2)
    found = [
        pathways.pathway(roster, lane, beacon=beacon, epoch=Epoch(0), turn=cycle * size + place)[0]
        for place in range(size)
    ]
    assert sorted(found) == sorted(miners)
    for hotkey in miners:
        turn = pathways.turn_of(roster, lane, beacon=beacon, epoch=Epoch(0), hotkey=hotkey, cycle=cycle)
        assert found[turn - cycle * size] == hotkey


@given(st.integers(0, 3), st.integers(0, 40), st.text(max_size=5))
def test_who_passes_a_sample_alone_takes_its_turn_in_the_order_of_the_roster(
    stage: int, cycle: int, beacon: str
) -> None:
    roster = tuple(tuple(Hotkey(f"s{at}m{place}") for place in range(3)) for at in range(4))
    lane = range(stage, stage + 1)
    for place, hotkey in enumerate(roster[stage]):
        turn = pathways.turn_of(roster, lane, beacon=beacon, epoch=Epoch(7), hotkey=hotkey, cycle=cycle)
        assert turn == 3 * cycle + place
        assert pathways.pathway(roster, lane, beacon="another", epoch=Epoch(7), turn=turn) == (hotkey,)


def test_pairs_of_miners_meet_about_equally_often() -> None:
    """No pair is met twice as often as the product of the marginals says."""
    roster = tuple(tuple(Hotkey(f"s{stage}m{place}") for place in range(4)) for stage in range(2))
    num_samples = 1600
    met = Counter(
        pathways.pathway(roster, range(2), beacon="b", epoch=Epoch(0), turn=turn) for turn in range(num_samples)
    )
    assert len(met) == 16
    assert max(met.values()) <= 2 * num_samples / 16


def test_another_beacon_draws_other_pathways() -> None:
    roster = tuple(tuple(Hotkey(f"s{stage}m{place}") for place in range(3)) for stage in range(3))
    drawn = {
        beacon: [pathways.pathway(roster, range(3), beacon=beacon, epoch=Epoch(0), turn=turn) for turn in range(30)]
        for beacon in "ab"
    }
    assert drawn["a"] != drawn["b"]


@given(st.integers(1, 9), st.integers(0, 9))
def test_a_substitute_is_a_candidate_and_depends_on_the_attempt_alone(size: int, attempt: int) -> None:
    candidates = [Hotkey(f"m{place}") for place in range(size)]
    found = [
        pathways.substitute(
            candidates, beacon="b", epoch=Epoch(0), sample=SampleId(3), stage=StageIndex(1), attempt=attempt
        )
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert found[0] in candidates
