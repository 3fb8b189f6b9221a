"""Rounds of stages that train apart, by plain calls in one process: what a run over any network must come to, to the bit.

No clock, no messages and no orchestrator: a round is a function of the published snapshots, of who trained on which samples in
which order, and of what every worker's optimizer remembers of earlier rounds (papers.md B3).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from subnet.config import RunConfig
from subnet.merging.reduce import reduce_shard
from subnet.merging.schedule import shard_plans
from subnet.model.init import initial_params
from subnet.model.partition import neighbours_of, num_elements
from subnet.ports import Corpus
from subnet.training.neighbours import open_neighbours
from subnet.training.outer import decode_snapshot, encode_snapshot, keep_params, outer_step, pseudo_gradient
from subnet.training.pipeline import StageWorker
from subnet.types import Epoch, Hotkey, NumericMode, SampleId, StageIndex

Vector = npt.NDArray[np.float32]
Work = Mapping[Hotkey, Sequence[SampleId]]
"""Samples of each worker, in the order in which it trained on them."""


class Rounds:
    """Every stage of a run, from its first params on. `snapshots` are the bytes that the next round starts from."""

    def __init__(self, config: RunConfig, corpus: Corpus, mode: NumericMode = NumericMode.FP32) -> None:
        self._config = config
        self._corpus = corpus
        self._mode = mode
        self._workers: dict[Hotkey, StageWorker] = {}
        stages = [StageIndex(stage) for stage in range(config.training.num_stages)]
        fresh = [initial_params(config, stage) for stage in stages]
        self.snapshots = tuple(encode_snapshot(params, np.zeros_like(params)) for params in fresh)

    def play(self, epoch: Epoch, work: Sequence[Work]) -> None:
        """One round: `work` for each stage; a stage on which nobody worked stays as it is."""
        self.snapshots = tuple(
            self._merged(StageIndex(stage), self._trained(epoch, StageIndex(stage), mine)) if mine else before
            for stage, (mine, before) in enumerate(zip(work, self.snapshots, strict=True))
        )

    def _trained(self, epoch: Epoch, stage: StageIndex, work: Work) -> dict[Hotkey, tuple[Vector, int]]:
        """What each worker moved its params by, away from the published ones, and in how many batches; by hotkey."""
        others = neighbours_of(self._config, stage)
        neighbours = open_neighbours(self._config, stage, [self.snapshots[other] for other in others])
        anchor, _ = decode_snapshot(self.snapshots[stage], num_elements(self._config, stage))
        moved: dict[Hotkey, tuple[Vector, int]] = {}
        for hotkey in sorted(work):
            if hotkey not in self._workers or self._workers[hotkey].stage != stage:
                self._workers[hotkey] = StageWorker(self._config, stage, self._mode)
            worker = self._workers[hotkey]
            if neighbours:
                worker.load_neighbours(neighbours)
            worker.load(anchor)
            self._train(worker, epoch, work[hotkey])
            moved[hotkey] = pseudo_gradient(anchor, worker.params()), len(work[hotkey])
        return moved

    def _train(self, worker: StageWorker, epoch: Epoch, samples: Sequence[SampleId]) -> None:
        for sample in samples:
            key = (int(epoch), int(sample), 0)
            worker.forward(key, self._corpus.tokens(epoch, sample), None)
            worker.backward(key, None)
            if worker.num_accumulated >= self._config.training.accumulate:
                worker.step()
        if worker.num_accumulated:
            worker.step()

    def _merged(self, stage: StageIndex, moved: Mapping[Hotkey, tuple[Vector, int]]) -> bytes:
        """The stage's next snapshot: the gated mean by batches, shard by shard as the butterfly cuts it, and the outer step."""
        config, size = self._config, num_elements(self._config, stage)
        params, momentum = decode_snapshot(self.snapshots[stage], size)
        shards = shard_plans(
            size, list(moved), beacon="", stage=stage, epoch=Epoch(0), chunk_bytes=config.merge.chunk_bytes
        )
        counts = [count for _, count in moved.values()]
        parts = [
            reduce_shard([vector[shard.start : shard.stop] for vector, _ in moved.values()], counts, config.merge)
            for shard in shards
        ]
        mean = np.concatenate(parts)
        if len(moved) == 1:
            return encode_snapshot(*keep_params(params, momentum, mean))
        return encode_snapshot(*outer_step(params, momentum, mean, config.training))
