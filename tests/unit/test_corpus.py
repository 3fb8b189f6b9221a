"""The packaged text: pure samples, a held-out part that shares nothing with training, and bad configurations named."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.adapters.corpus import Manifest, SotuCorpus, make_corpus
from subnet.config import CorpusConfig, ModelConfig, RunConfig, TrainingConfig
from subnet.errors import InvalidConfig
from subnet.types import Epoch, SampleId

CORPUS = SotuCorpus(CorpusConfig(), microbatch_size=4, num_tokens=64)
MANIFEST = msgspec.json.decode(CORPUS.manifest_bytes, type=Manifest)


@given(st.integers(0, 1000), st.integers(0, 1 << 40))
def test_samples_are_pure_and_of_the_right_shape(epoch: int, sample: int) -> None:
    again = SotuCorpus(CorpusConfig(), microbatch_size=4, num_tokens=64)
    tokens = CORPUS.tokens(Epoch(epoch), SampleId(sample))
    assert tokens.shape == (4, 65)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < 256
    assert np.array_equal(tokens, again.tokens(Epoch(epoch), SampleId(sample)))


def test_samples_differ_by_epoch_sample_row_and_seed() -> None:
    other = SotuCorpus(CorpusConfig(seed=1), microbatch_size=4, num_tokens=64)
    rows = [
        *CORPUS.tokens(Epoch(0), SampleId(0)),
        *CORPUS.tokens(Epoch(0), SampleId(1)),
        *CORPUS.tokens(Epoch(1), SampleId(0)),
        *other.tokens(Epoch(0), SampleId(0)),
    ]
    assert len({row.tobytes() for row in rows}) == 16
    assert other.digest != CORPUS.digest


def test_the_text_is_english_and_the_split_is_as_the_manifest_says() -> None:
    assert len(MANIFEST.speeches) == 233
    assert b"the people of the United States" in CORPUS._split.train.tobytes()
    sizes = {speech.name: speech.size_bytes for speech in MANIFEST.speeches}
    assert MANIFEST.num_heldout_tokens == sum(sizes[name] for name in MANIFEST.heldout)
    assert MANIFEST.num_train_tokens + MANIFEST.num_heldout_tokens == sum(sizes.values()) > 10_000_000
    assert 0.05 <= MANIFEST.num_heldout_tokens / sum(sizes.values()) < 0.07


def test_nothing_held_out_stands_in_the_training_text() -> None:
    train, heldout = CORPUS._split.train.tobytes(), CORPUS._split.heldout.tobytes()
    for at in range(150, len(heldout) - 300, 20_000):
        assert heldout[at : at + 150] not in train


def test_held_out_microbatches_tile_the_text_and_begin_anew() -> None:
    inputs = [CORPUS.heldout(index)[:, :-1].astype(np.uint8).tobytes() for index in range(CORPUS.num_heldout)]
    text = CORPUS._split.heldout.tobytes()
    assert text.startswith(b"".join(inputs))
    assert len(text) - len(b"".join(inputs)) <= 4 * 64 + 1
    assert np.array_equal(CORPUS.heldout(CORPUS.num_heldout + 3), CORPUS.heldout(3))


def test_counts_are_of_the_training_text() -> None:
    counts = CORPUS.token_counts()
    assert counts.shape == (256,)
    assert counts.sum() == MANIFEST.num_train_tokens
    shares = counts[counts > 0] / counts.sum()
    entropy = -math.fsum(float(share) * math.log(share) for share in shares)
    assert 2.9 < entropy < 3.2


def test_what_cannot_be_is_named_with_its_range() -> None:
    cases = [
        (RunConfig(corpus=CorpusConfig(name="wiki")), "corpus.name must be sotu"),
        (RunConfig(corpus=CorpusConfig(tokenizer="bpe")), "corpus.tokenizer must be bytes"),
        (RunConfig(model=ModelConfig(vocab_size=128)), "model.vocab_size must be at least 256"),
        (RunConfig(training=TrainingConfig(microbatch_size=1000, num_tokens=4096)), "must be at most"),
    ]
    for config, reason in cases:
        with pytest.raises(InvalidConfig, match=reason):
            make_corpus(config)
    assert make_corpus(RunConfig()).tokens(Epoch(0), SampleId(0)).shape == (8, 129)


def test_the_split_is_frozen() -> None:
    golden = (CORPUS.tokens(Epoch(3), SampleId(7))[0, :32].astype(np.uint8).tobytes(), CORPUS.digest)
    assert golden == (
        b" the limitations of time under w",
        "bebbb011bbb309d5bfd492750484abeae57131a86d34986ae7bf019038968047",
    )
