"""The trigram table against sums by hand."""

import math

import numpy as np
import pytest

from subnet.inference.ngrams import TrigramTable


def test_interpolation_by_hand() -> None:
    table = TrigramTable(4)
    table.fit([np.array([[0, 1, 2, 0, 1, 3]])])
    # unigrams 0 1 2 3: 2 2 1 1 of 6, four kinds; after 1: 2 and 3; after (0, 1): 2 and 3
    unigram = 0.4 * 0.25 + 0.6 * 1 / 6
    bigram = 0.5 * unigram + 0.5 * 0.5
    trigram = 0.5 * bigram + 0.5 * 0.5
    first = (0.4 * 0.25 + 0.6 * 2 / 6) * 1 / 3 + 2 / 3  # 1 after 0, seen twice, one kind
    found = table.loss([np.array([[0, 1, 3]])])
    assert found == pytest.approx(-(math.log(first) + math.log(trigram)) / 2)


def test_probabilities_sum_to_one() -> None:
    table = TrigramTable(5)
    table.fit([np.array([[0, 1, 2, 3, 1, 2, 4, 0, 1], [2, 2, 2, 1, 0, 3, 3, 1, 1]])])
    for context in ((0, 1), (2, 2), (4, 4), (1, 0)):
        firsts = table.loss([np.array([[*context]])])
        losses = [2 * table.loss([np.array([[*context, last]])]) - firsts for last in range(5)]
        assert math.fsum(math.exp(-loss) for loss in losses) == pytest.approx(1)


def test_repeating_text_is_cheap_and_foreign_text_is_not() -> None:
    table = TrigramTable(8)
    table.fit([np.tile(np.arange(8), (2, 20))])
    assert table.loss([np.tile(np.arange(8), (1, 4))]) < 0.1
    assert table.loss([np.array([[3, 1, 7, 5, 2, 6, 0, 4]])]) > 2.5
