"""Tables of counts as controls: what a loss is worth that no network was needed for.

Legend: V vocabulary.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class TrigramTable:
    """Witten-Bell interpolation of trigrams, bigrams, unigrams and the uniform distribution.

    A context seen n times with d different continuations trusts its own counts by n / (n + d), and the shorter context for the
    rest.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grams = [np.empty(0, dtype=np.int64) for _ in range(3)]
        self._counts = [np.empty(0, dtype=np.int64) for _ in range(3)]

    def fit(self, samples: Iterable[Ids]) -> None:
        """Count every (B, T + 1) sample; what was counted before is forgotten."""
        rows = [np.array(sample, dtype=np.int64) for sample in samples]
        for order in range(3):
            grams = np.concatenate([self._windows(sample, order + 1).ravel() for sample in rows])
            self._grams[order], self._counts[order] = np.unique(grams, return_counts=True)

    def loss(self, samples: Iterable[Ids]) -> float:
        """Mean nats for each target of (B, T + 1) samples; the first target of a row has one token of context."""
        surprises = []
        for sample in samples:
            probability = np.full(sample[:, 1:].shape, 1 / self._vocab_size)
            for order in range(3):
                own, trust = self._interpolated(np.array(sample, dtype=np.int64), order)
                probability[:, max(0, order - 1) :] *= 1 - trust
                probability[:, max(0, order - 1) :] += trust * own
            surprises.append(-np.log(probability).ravel())
        return float(np.concatenate(surprises).mean())

    def _interpolated(self, sample: Ids, order: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """For each target with `order` tokens before it: its share of that context's counts, and the trust in the context."""
        grams = self._windows(sample, order + 1)
        if order == 0:
            grams = grams[:, 1:]
        count = self._look_up(self._grams[order], self._counts[order], grams)
        contexts = self._grams[order] // self._vocab_size if order else np.zeros(len(self._grams[0]), dtype=np.int64)
        names, starts = np.unique(contexts, return_index=True)
        totals = np.add.reduceat(self._counts[order], starts)
        kinds = np.diff(np.append(starts, len(contexts)))
        context = grams // self._vocab_size if order else np.zeros_like(grams)
        total = self._look_up(names, totals, context)
        different = self._look_up(names, kinds, context)
        return count / np.maximum(total, 1), total / np.maximum(total + different, 1)

    def _windows(self, sample: Ids, length: int) -> Ids:
        """(B, T + 2 - length) numbers that name `length` tokens in a row."""
        named = np.zeros_like(sample[:, length - 1 :])
        for offset in range(length):
            named = named * self._vocab_size + sample[:, offset : sample.shape[1] - length + 1 + offset]
        return named

    @staticmethod
    def _look_up(names: Ids, values: Ids, wanted: Ids) -> Ids:
        """The value of each wanted name, zero where there is none."""
        at = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
        return np.where(names[at] == wanted, values[at], 0)
