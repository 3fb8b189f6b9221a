import math
from itertools import combinations

import pytest

from subnet.merging.audits import Copied, audited_shards, colluding_share, copied_uploads, detection_probability
from subnet.merging.schedule import shard_plans
from subnet.types import Digest, Epoch, Hotkey, StageIndex

MINERS = [Hotkey(f"5{index:02d}") for index in range(20)]
PLANS = shard_plans(190 * 64, MINERS, beacon="b", stage=StageIndex(0), epoch=Epoch(1), chunk_bytes=256)


def audited(fraction: float, beacon: str = "later") -> tuple[int, ...]:
    return audited_shards(PLANS, fraction, beacon=beacon, stage=StageIndex(0), epoch=Epoch(1))


def test_colluders_share_exactly_the_shards_of_their_pairs() -> None:
    for count in range(21):
        colluders = set(MINERS[:count])
        shared = sum(set(plan.reducers) <= colluders for plan in PLANS)
        assert colluding_share(20, count) == pytest.approx(shared / len(PLANS))


@pytest.mark.parametrize(("miners", "colluders"), [(1, 0), (4, 5), (4, -1)])
def test_impossible_counts_are_refused(miners: int, colluders: int) -> None:
    with pytest.raises(ValueError, match="num_colluders"):
        colluding_share(miners, colluders)


def test_each_shard_is_audited_with_the_given_probability() -> None:
    rounds, fraction = 300, 0.08
    total = sum(len(audited(fraction, str(round_))) for round_ in range(rounds))
    expected = rounds * len(PLANS) * fraction
    assert abs(total - expected) < 4.0 * math.sqrt(expected)
    assert audited(0.0) == ()
    assert audited(1.0) == tuple(range(len(PLANS)))


def test_colluders_are_found_at_the_computed_rate() -> None:
    """Five colluders of twenty corrupt the ten shards they share; with 8 % audited that shows in 57 % of epochs."""
    corrupt = {plan.shard for plan in PLANS if set(plan.reducers) <= set(MINERS[:5])}
    assert len(corrupt) == len(list(combinations(range(5), 2)))
    rounds = 600
    caught = sum(bool(corrupt & set(audited(0.08, f"epoch {round_}"))) for round_ in range(rounds))
    expected = detection_probability(len(corrupt), 0.08)
    assert expected == pytest.approx(0.5656, abs=1e-4)
    assert abs(caught / rounds - expected) < 3.0 * math.sqrt(expected * (1 - expected) / rounds)


def test_copied_uploads_are_named() -> None:
    own = {Hotkey(name): [Digest(f"{name}{chunk}") for chunk in range(10)] for name in "abcd"}
    own[Hotkey("d")] = [*own[Hotkey("b")][:9], Digest("changed")]
    own[Hotkey("c")] = [*own[Hotkey("a")][:5], *own[Hotkey("c")][5:]]
    assert copied_uploads(own) == (Copied(pair=(Hotkey("b"), Hotkey("d")), share=0.9),)
    assert copied_uploads({Hotkey("a"): [], Hotkey("b"): []}) == ()
