"""Small exported models for tests of serving."""

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neurons.export import write_directory
from neurons.published import Published
from subnet.config import (
    BlockTrainConfig,
    Bottleneck,
    DiffusionContext,
    ModelConfig,
    Objective,
    RunConfig,
    RunKind,
    TrainingConfig,
)
from subnet.inference.decode import StageRunner
from subnet.inference.served import ServedModel, read_config
from subnet.model.flat import unflatten
from subnet.model.init import initial_params
from subnet.model.partition import param_shapes
from subnet.training.outer import encode_snapshot
from subnet.types import Epoch, StageIndex

Vectors = list[npt.NDArray[np.float32]]


def run_config(bottleneck: Bottleneck = Bottleneck.NONE, *, num_stages: int = 3, vocab_size: int = 256) -> RunConfig:
    """Six layers of bytes; anchors where there is a bottleneck."""
    return RunConfig(
        model=ModelConfig(
            vocab_size=vocab_size,
            width=64,
            num_layers=6,
            num_heads=4,
            num_kv_heads=2,
            ffn_width=96,
            bottleneck=bottleneck,
            bottleneck_width=4,
            anchor_ids=bottleneck is not Bottleneck.NONE,
        ),
        training=TrainingConfig(num_stages=num_stages, microbatch_size=2, num_tokens=256),
    )


def moved_params(config: RunConfig) -> Vectors:
    """Params far enough from their first values that the next token depends on all of the text."""
    draw = np.random.default_rng(0)
    vectors = [initial_params(config, StageIndex(stage)) for stage in range(config.training.num_stages)]
    return [vector + draw.normal(0, 0.12, vector.shape).astype(np.float32) for vector in vectors]


def write_model(config: RunConfig, place: Path, *, vectors: Vectors | None = None) -> Path:
    """The directory that `strata export` would write."""
    published = Published(run_id="run", config=config, corpus_digest="", epoch=Epoch(3), snapshots=())
    snapshots = [encode_snapshot(vector, np.zeros_like(vector)) for vector in vectors or moved_params(config)]
    write_directory(published, snapshots, place)
    return place


def all_params(config: RunConfig, vectors: Vectors) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {}
    for stage, vector in enumerate(vectors):
        params |= unflatten(vector, param_shapes(config, StageIndex(stage)))
    return params


def runners(place: Path, params: dict[str, Tensor], num_stages: int) -> tuple[ServedModel, list[StageRunner]]:
    served = read_config((place / "config.json").read_bytes())
    return served, [StageRunner(served, stage, num_stages, params, max_positions=512) for stage in range(num_stages)]


def prompts(count: int, *, shortest: int = 3, longest: int = 90, vocab_size: int = 256) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(shortest, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def blocktrain_config(
    objective: Objective,
    context: DiffusionContext = DiffusionContext.CONCAT,
    *,
    num_stages: int = 3,
    num_tokens: int = 64,
) -> RunConfig:
    """Six layers in stages that train apart."""
    config = run_config(num_stages=num_stages)
    training = msgspec.structs.replace(config.training, num_tokens=num_tokens)
    blocktrain = BlockTrainConfig(objective=objective, context=context)
    return msgspec.structs.replace(config, kind=RunKind.BLOCKTRAIN, training=training, blocktrain=blocktrain)
