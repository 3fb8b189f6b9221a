"""How good stages that were trained alone are together, on text nobody trained on (papers.md B4).

Only what a model could say before it has seen the target counts as its loss. The loss around the noisy target, which a denoising
stage is trained on, is reported as what it is: leaky.

Shapes: B batch, T tokens, V vocabulary; K paths.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from subnet.config import Objective, RunConfig
from subnet.inference.sweep import DenoisingStack, PredictingStack
from subnet.model.noise import stage_at, unit_noise
from subnet.ports import Corpus

Vector = npt.NDArray[np.float32]

LEAKY_SIGMAS = (1.0, 2.0, 3.0, 5.0, 10.0)
NUM_PATHS = (4, 16)


@dataclass(frozen=True, slots=True)
class DenoisingEvaluation:
    """Nats for each token. `leaky` has (sigma, loss) with the true target in the input: no likelihood.

    `first_stage` is H0: the first stage alone, from pure noise. `one_path` is H1: the whole chain, the ids as context.
    `mixtures` has (K, HK): the mean of the probabilities of K paths.
    """

    leaky: tuple[tuple[float, float], ...]
    first_stage: float
    one_path: float
    mixtures: tuple[tuple[int, float], ...]

    @property
    def leaky_mean(self) -> float:
        """Over the noise levels that were asked for."""
        return math.fsum(loss for _, loss in self.leaky) / len(self.leaky)

    @property
    def composition_gain(self) -> float:
        """H0 - HK at the largest K: what the stages after the first add."""
        return self.first_stage - self.mixtures[-1][1]


@dataclass(frozen=True, slots=True)
class PredictingEvaluation:
    """Nats for each token at every depth, the shallowest first; each is a true likelihood."""

    at_depth: tuple[float, ...]

    @property
    def composition_gain(self) -> float:
        """What the stages after the first add."""
        return self.at_depth[0] - self.at_depth[-1]


BlockEvaluation = DenoisingEvaluation | PredictingEvaluation


def bits(nats: float) -> float:
    """Nats as bits."""
    return nats / math.log(2)


def evaluate_blocks(
    config: RunConfig, stage_params: Sequence[Vector], corpus: Corpus, num_batches: int
) -> BlockEvaluation:
    """Over the first `num_batches` held-out microbatches, params given for every stage in order.

    Raises ProtocolViolation when a vector is not the params of its stage.
    """
    with torch.no_grad():
        if config.blocktrain.objective is Objective.DIFFUSION:
            return _denoising(DenoisingStack(config, stage_params), corpus, num_batches)
        return _predicting(PredictingStack(config, stage_params), corpus, num_batches)


def _heldout(corpus: Corpus, num_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    for index in range(num_batches):
        tokens = torch.from_numpy(np.array(corpus.heldout(index)))
        yield tokens[:, :-1], tokens[:, 1:]


def _target_log_probs(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """(B, T) log probability of each target."""
    return -functional.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")


def _predicting(stack: PredictingStack, corpus: Corpus, num_batches: int) -> PredictingEvaluation:
    sums = [0.0] * stack.config.training.num_stages
    for ids_BT, targets_BT in _heldout(corpus, num_batches):
        for depth, logits_BTV in enumerate(stack.logits(ids_BT)):
            sums[depth] -= float(_target_log_probs(logits_BTV, targets_BT).mean())
    return PredictingEvaluation(at_depth=tuple(total / num_batches for total in sums))


def _denoising(stack: DenoisingStack, corpus: Corpus, num_batches: int) -> DenoisingEvaluation:
    first: list[float] = []
    paths: list[list[float]] = [[] for _ in (1, *NUM_PATHS)]
    leaky: list[list[float]] = [[] for _ in LEAKY_SIGMAS]
    for index, (ids_BT, targets_BT) in enumerate(_heldout(corpus, num_batches)):
        of_paths = []
        for path in range(max(NUM_PATHS)):
            unit_BTD = torch.from_numpy(unit_noise(stack.config, "path", stack.config.model.seed, index, path))
            depths = list(stack.logits(ids_BT, unit_BTD))
            of_paths.append(_target_log_probs(depths[-1], targets_BT))
            if path == 0:
                first.append(-float(_target_log_probs(depths[0], targets_BT).mean()))
        for found, count in zip(paths, (1, *NUM_PATHS), strict=True):
            found.append(_mixture_loss(of_paths[:count]))
        unit_BTD = torch.from_numpy(unit_noise(stack.config, "leaky", stack.config.model.seed, index))
        for found, sigma in zip(leaky, _sigmas_within(stack.config), strict=True):
            found.append(_leaky_loss(stack, ids_BT, targets_BT, unit_BTD, sigma))
    one_path, *mixtures = (math.fsum(found) / num_batches for found in paths)
    return DenoisingEvaluation(
        leaky=tuple(
            (sigma, math.fsum(found) / num_batches)
            for sigma, found in zip(_sigmas_within(stack.config), leaky, strict=True)
        ),
        first_stage=math.fsum(first) / num_batches,
        one_path=one_path,
        mixtures=tuple(zip(NUM_PATHS, mixtures, strict=True)),
    )


def _sigmas_within(config: RunConfig) -> list[float]:
    """The levels of the report, moved to the ends of a run that trains on fewer."""
    low, high = config.blocktrain.sigma_min, config.blocktrain.sigma_max
    return [min(max(sigma, low), high) for sigma in LEAKY_SIGMAS]


def _mixture_loss(of_paths: Sequence[Tensor]) -> float:
    """-ln of the mean probability over paths, mean over tokens."""
    joint_BT = torch.logsumexp(torch.stack(list(of_paths)), dim=0) - math.log(len(of_paths))
    return -float(joint_BT.mean())


def _leaky_loss(stack: DenoisingStack, ids_BT: Tensor, targets_BT: Tensor, unit_BTD: Tensor, sigma: float) -> float:
    """By the stage whose band the level lies in."""
    blocktrain, num_stages = stack.config.blocktrain, stack.config.training.num_stages
    noisy_BTD = stack.codebook_VD[targets_BT] + sigma * unit_BTD
    logits_BTV = stack.denoise(stage_at(blocktrain, num_stages, sigma), noisy_BTD, sigma, ids_BT)
    return -float(_target_log_probs(logits_BTV, targets_BT).mean())


@dataclass(frozen=True, slots=True)
class LeakTest:
    """Whether logits up to a position moved when its target and everything after it was changed.

    `from_noise` must be False. `around_target`, where the stage sees its noisy target, must be True, or the test would not see a
    leak; None where nothing is denoised.
    """

    from_noise: bool
    around_target: bool | None

    @property
    def is_passed(self) -> bool:
        """No leak from pure noise, and the positive control leaks."""
        return not self.from_noise and self.around_target is not False


def leak_test(config: RunConfig, stage_params: Sequence[Vector], corpus: Corpus) -> LeakTest:
    """On one held-out microbatch, at its middle; the logits compared must be equal to the bit."""
    tokens = torch.from_numpy(np.array(corpus.heldout(0)))
    position = config.training.num_tokens // 2
    changed = tokens.clone()
    changed[:, position + 1 :] = (changed[:, position + 1 :] + 1) % config.model.vocab_size
    with torch.no_grad():
        if config.blocktrain.objective is not Objective.DIFFUSION:
            stack = PredictingStack(config, stage_params)
            pairs = zip(stack.logits(tokens[:, :-1]), stack.logits(changed[:, :-1]), strict=True)
            return LeakTest(from_noise=_has_moved(pairs, position), around_target=None)
        denoising = DenoisingStack(config, stage_params)
        unit_BTD = torch.from_numpy(unit_noise(config, "leak", config.model.seed))
        from_noise = zip(
            denoising.logits(tokens[:, :-1], unit_BTD), denoising.logits(changed[:, :-1], unit_BTD), strict=True
        )
        around = [_around(denoising, each, unit_BTD) for each in (tokens, changed)]
        return LeakTest(
            from_noise=_has_moved(from_noise, position), around_target=_has_moved([(around[0], around[1])], position)
        )


def _around(stack: DenoisingStack, tokens: Tensor, unit_BTD: Tensor) -> Tensor:
    """Logits of the last stage with the noisy target in its input, at the least noise."""
    blocktrain, num_stages = stack.config.blocktrain, stack.config.training.num_stages
    sigma = blocktrain.sigma_min
    noisy_BTD = stack.codebook_VD[tokens[:, 1:]] + sigma * unit_BTD
    return stack.denoise(stage_at(blocktrain, num_stages, sigma), noisy_BTD, sigma, tokens[:, :-1])


def _has_moved(pairs: Iterator[tuple[Tensor, Tensor]] | Sequence[tuple[Tensor, Tensor]], position: int) -> bool:
    return any(not torch.equal(one[:, : position + 1], other[:, : position + 1]) for one, other in pairs)
