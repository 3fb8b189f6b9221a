"""Published params of the stages that a BlockTrain stage computes with and never changes (papers.md B4)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.model.init import initial_params
from subnet.model.partition import neighbours_of, num_elements
from subnet.training.outer import decode_snapshot
from subnet.types import StageIndex

Neighbours = Mapping[StageIndex, npt.NDArray[np.float32]]
"""Flat params by stage."""
NO_NEIGHBOURS: Neighbours = MappingProxyType({})


def open_neighbours(config: RunConfig, stage: StageIndex, snapshots: Sequence[bytes]) -> Neighbours:
    """Params from the snapshots of `neighbours_of` the stage, in that order. Raises ProtocolViolation."""
    stages = neighbours_of(config, stage)
    if len(snapshots) != len(stages):
        raise ProtocolViolation(f"stage {stage} computes with stages {stages}, got {len(snapshots)} snapshots")
    return {
        other: decode_snapshot(data, num_elements(config, other))[0]
        for other, data in zip(stages, snapshots, strict=True)
    }


def fresh_neighbours(config: RunConfig, stage: StageIndex) -> Neighbours:
    """As they are before anybody has trained."""
    return {other: initial_params(config, other) for other in neighbours_of(config, stage)}
