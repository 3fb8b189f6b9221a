"""The plan without torch: layers tile the model, shapes are the module's, FLOPs count what is multiplied."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.config import Bottleneck, ModelConfig, RunConfig, TrainingConfig
from subnet.errors import ProtocolViolation
from subnet.model.flat import flatten, unflatten
from subnet.model.init import initial_params
from subnet.model.partition import (
    ANCHOR_RANK,
    layers_of,
    num_elements,
    param_shapes,
    stage_flops,
)
from subnet.model.stage import build_stage
from subnet.types import StageIndex
from tests.numerics.support import small_config


@given(num_layers=st.integers(1, 64), num_stages=st.integers(1, 64))
def test_layers_tile_the_model_in_order(num_layers: int, num_stages: int) -> None:
    num_stages = min(num_stages, num_layers)
    config = RunConfig(model=ModelConfig(num_layers=num_layers), training=TrainingConfig(num_stages=num_stages))
    cuts = [layers_of(config, StageIndex(stage)) for stage in range(num_stages)]
    assert [layer for cut in cuts for layer in cut] == list(range(num_layers))
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1


def test_sixteen_layers_in_three_stages_fall_as_published() -> None:
    config = RunConfig(model=ModelConfig(num_layers=16), training=TrainingConfig(num_stages=3))
    assert [layers_of(config, StageIndex(stage)) for stage in range(3)] == [range(5), range(5, 10), range(10, 16)]


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stage must be in \[0, 3\), got 3"):
        layers_of(small_config(), StageIndex(3))


@pytest.mark.parametrize("vocab_size", [48, 300_000])
@pytest.mark.parametrize("anchor_ids", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("bottleneck", list(Bottleneck))
def test_shapes_are_those_of_the_module(
    bottleneck: Bottleneck, num_stages: int, anchor_ids: bool, vocab_size: int
) -> None:
    config = small_config(bottleneck, num_stages=num_stages, anchor_ids=anchor_ids)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, vocab_size=vocab_size))
    seen: set[str] = set()
    for index in range(num_stages):
        stage = StageIndex(index)
        module = build_stage(config, stage)
        found = {name: tuple(param.shape) for name, param in sorted(module.named_parameters())}
        assert found == param_shapes(config, stage)
        assert list(found) == list(param_shapes(config, stage))
        assert num_elements(config, stage) == sum(param.numel() for param in module.parameters())
        assert not seen & set(found)
        seen |= set(found)


def test_a_large_anchor_is_factored() -> None:
    config = RunConfig(
        model=ModelConfig(vocab_size=128_256, width=2048, num_heads=16, num_kv_heads=8, bottleneck_width=32)
    )
    shapes = param_shapes(config, StageIndex(1))
    assert shapes["cuts.0.anchor.table.weight"] == (128_256, ANCHOR_RANK)
    assert shapes["cuts.0.anchor.lift.weight"] == (2048, ANCHOR_RANK)


def test_flops_of_an_uncut_middle_stage_by_hand() -> None:
    config = small_config(Bottleneck.NONE, anchor_ids=False, num_layers=3)
    matrices = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96
    num_tokens, scores = 2 * 16, 2 * (16 * 16) / 2
    assert stage_flops(config, StageIndex(1)) == 3 * (2 * matrices * num_tokens + 2 * 2 * scores * 64)
    assert stage_flops(config, StageIndex(2)) - stage_flops(config, StageIndex(1)) == 3 * 2 * 64 * 48 * num_tokens


def test_the_plan_needs_no_torch() -> None:
    code = (
        "import sys; from subnet.config import RunConfig; from subnet.model.partition import num_elements, stage_flops;"
        "num_elements(RunConfig(), 0); stage_flops(RunConfig(), 0); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_flat_vector_and_back() -> None:
    config = small_config()
    stage = StageIndex(1)
    vector = initial_params(config, stage)
    assert vector.dtype == np.float32 and vector.shape == (num_elements(config, stage),)
    assert np.array_equal(flatten(unflatten(vector, param_shapes(config, stage))), vector)


def test_initial_params_depend_on_the_seed_alone() -> None:
    config = small_config()
    stage = StageIndex(0)
    other = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, seed=1))
    assert np.array_equal(initial_params(config, stage), initial_params(config, stage))
    assert not np.array_equal(initial_params(config, stage), initial_params(other, stage))


def test_initial_params_do_not_depend_on_the_cuts() -> None:
    whole, halves = (small_config(Bottleneck.NONE, anchor_ids=False, num_stages=count) for count in (1, 2))
    both = [
        unflatten(initial_params(config, StageIndex(stage)), param_shapes(config, StageIndex(stage)))
        for config, stage in ((whole, 0), (halves, 1))
    ]
    name = "model.layers.3.mlp.up_proj.weight"
    assert bool((both[0][name] == both[1][name]).all())


@pytest.mark.parametrize(
    ("vector", "reason"),
    [
        (np.zeros(3, dtype=np.float32), "float32 values, got float32 "),
        (np.zeros(num_elements(small_config(), StageIndex(0))), "got float64"),
        (np.full(num_elements(small_config(), StageIndex(0)), np.nan, dtype=np.float32), "NaN"),
    ],
)
def test_foreign_vectors_are_refused(vector: "np.ndarray[tuple[int], np.dtype[np.float32]]", reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        unflatten(vector, param_shapes(small_config(), StageIndex(0)))
