"""Which stages a sample passes; the only place that tells a pipeline from stages that train apart."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.config import RunConfig, RunKind, TrainingConfig
from subnet.lanes import Lanes, hop, lanes
from subnet.types import Epoch, Hotkey, Lease, SampleId, StageIndex

PIPELINE = RunConfig(training=TrainingConfig(num_stages=3))
APART = msgspec.structs.replace(PIPELINE, kind=RunKind.BLOCKTRAIN)
shapes = st.tuples(st.integers(1, 6), st.integers(1, 6)).map(
    lambda shape: Lanes(num_stages=shape[0] * shape[1], length=shape[1])
)


def lease(sample: int, *hops: str) -> Lease:
    named = tuple(map(Hotkey, hops))
    return Lease(run_id="r", epoch=Epoch(0), sample=SampleId(sample), branch=0, attempt=0, hops=named, deadline_s=1.0)


def test_a_pipeline_is_one_lane_and_blocks_are_a_lane_each() -> None:
    assert list(lanes(PIPELINE)) == [range(3)]
    assert list(lanes(APART)) == [range(1), range(1, 2), range(2, 3)]


@given(shapes)
def test_lanes_tile_the_stages(shape: Lanes) -> None:
    assert [stage for lane in shape for stage in lane] == list(range(shape.num_stages))
    assert len(list(shape)) == shape.count
    for lane in shape:
        assert {shape.of_stage(StageIndex(stage)) for stage in lane} == {lane}


@given(shapes, st.integers(0, 1000))
def test_every_sample_is_of_one_lane_at_one_turn(shape: Lanes, number: int) -> None:
    sample = SampleId(number)
    assert shape.sample(shape.of_sample(sample), shape.turn(sample)) == sample


def test_lanes_share_no_sample() -> None:
    shape = lanes(APART)
    given_out = [shape.sample(lane, turn) for lane in shape for turn in range(5)]
    assert sorted(given_out) == list(range(15))


@pytest.mark.parametrize("stage", range(-1, 4))
def test_a_lease_names_a_miner_for_each_stage_of_its_lane_and_no_other(stage: int) -> None:
    whole = lease(7, "a", "b", "c")
    assert hop(PIPELINE, whole, stage) == (whole.hops[stage] if 0 <= stage < 3 else None)
    assert hop(APART, lease(7, "b"), stage) == ("b" if stage == 1 else None)
    assert hop(PIPELINE, lease(7, "b"), stage) is None
    assert hop(APART, whole, stage) is None
