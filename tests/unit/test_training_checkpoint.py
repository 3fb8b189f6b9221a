"""A checkpoint from a stranger: exactly the tensors of its stage, finite, or refused."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from subnet.errors import ProtocolViolation
from subnet.training.checkpoint import checkpoint_limit_bytes, read_checkpoint
from subnet.types import StageIndex
from tests.numerics.support import make_workers, small_config

PARAM = "param.model.layers.1.mlp.up_proj.weight"
STAGE = StageIndex(1)


def changed(change: Callable[[dict[str, Tensor]], object]) -> bytes:
    tensors = safetensors.torch.load(make_workers(small_config())[STAGE].checkpoint())
    change(tensors)
    return safetensors.torch.save(tensors)


def test_what_was_written_is_read() -> None:
    worker = make_workers(small_config())[STAGE]
    found = read_checkpoint(small_config(), STAGE, worker.checkpoint())
    assert np.array_equal(found.flat_params(), worker.params())
    assert (found.num_steps, found.num_optimizer_steps) == (0, 0)
    assert len(worker.checkpoint()) <= checkpoint_limit_bytes(small_config(), STAGE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(PARAM), "does not have the tensors of stage 1: param.model.layers.1.mlp.up_proj"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "extra"),
        (lambda tensors: tensors.update({PARAM: torch.zeros(64, 96)}), "must be float32"),
        (lambda tensors: tensors.update({PARAM: tensors[PARAM].half()}), "must be float32"),
        (lambda tensors: tensors.update({PARAM: tensors[PARAM].double()}), "limit"),
        (lambda tensors: tensors[PARAM].fill_(torch.nan), "NaN"),
        (lambda tensors: tensors[PARAM][0].fill_(torch.inf), "NaN or infinity"),
        (lambda tensors: tensors["count.num_steps"].fill_(-1), "one int64"),
        (lambda tensors: tensors.update({"count.num_steps": torch.zeros(1)}), "one int64"),
        (lambda tensors: tensors["adamw.square.model.layers.1.input_layernorm.weight"].fill_(-1), "negative"),
    ],
)
def test_a_changed_checkpoint_is_refused(change: Callable[[dict[str, Tensor]], object], reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        read_checkpoint(small_config(), STAGE, changed(change))


def test_a_checkpoint_of_another_stage_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="does not have the tensors of stage 1"):
        make_workers(small_config())[1].restore(make_workers(small_config())[0].checkpoint())


def header_only(header: object) -> bytes:
    body = json.dumps(header).encode()
    return len(body).to_bytes(8, "little") + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 8,
        b"\xff" * 64,
        header_only({}),
        header_only({PARAM: {"dtype": "F8_E8M0", "shape": [0], "data_offsets": [0, 0]}}),
        header_only({PARAM: {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        make_workers(small_config())[STAGE].checkpoint()[:-4],
        make_workers(small_config())[STAGE].checkpoint() + b"\x00" * 4,
        bytes(4 << 20),
    ],
)
def test_bytes_that_are_no_checkpoint_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match="checkpoint"):
        read_checkpoint(small_config(), STAGE, data)
