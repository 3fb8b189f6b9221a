"""Text as token ids, from speeches that come with the package: nothing is fetched, and every node has the same bytes.

A training sample is B windows of T + 1 tokens at drawn offsets of the training text; the held-out text consists of whole
other speeches and is read window after window.

Legend: B microbatch, T tokens, V vocabulary.
"""

import functools
from importlib import resources
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from subnet import draws
from subnet.config import CorpusConfig, RunConfig
from subnet.errors import InvalidConfig, InvariantBroken
from subnet.frames import digest
from subnet.receipts import canonical
from subnet.types import Digest, Epoch, Record, SampleId

BYTES_VOCAB = 256
_TEXT_LIMIT_BYTES = 64 << 20


class Speech(Record, frozen=True):
    """One document of the text."""

    name: str
    size_bytes: int
    digest: Digest


class _Contents(Record, frozen=True):
    name: str
    size_bytes: int
    digest: Digest
    speeches: tuple[Speech, ...]


class Manifest(Record, frozen=True):
    """What two nodes must agree on to train on the same tokens."""

    name: str
    tokenizer: str
    vocab_size: int
    seed: int
    heldout: tuple[str, ...]
    """Speeches that are never trained on."""
    num_train_tokens: int
    num_heldout_tokens: int
    speeches: tuple[Speech, ...]


class _Split(NamedTuple):
    manifest: Manifest
    train: npt.NDArray[np.uint8]
    heldout: npt.NDArray[np.uint8]


class SotuCorpus:
    """State of the Union addresses by bytes (ports.Corpus)."""

    def __init__(self, corpus: CorpusConfig, *, microbatch_size: int, num_tokens: int) -> None:
        if corpus.name != "sotu":
            raise InvalidConfig(f"corpus.name must be sotu, got {corpus.name!r}")
        if corpus.tokenizer != "bytes":
            raise InvalidConfig(f"corpus.tokenizer must be bytes, got {corpus.tokenizer!r}")
        self._split = _split(corpus)
        self._seed = corpus.seed
        self._B, self._T = microbatch_size, num_tokens
        longest = len(self._split.heldout) - 1
        if microbatch_size * num_tokens > longest:
            raise InvalidConfig(
                f"training.microbatch_size * training.num_tokens must be at most {longest}, the held-out tokens of corpus "
                f"{corpus.name}, got {microbatch_size} * {num_tokens}"
            )

    def tokens(self, epoch: Epoch, sample: SampleId) -> npt.NDArray[np.int64]:
        """(B, T + 1) token ids of a training sample."""
        limit = len(self._split.train) - self._T
        starts = [draws.below(limit, "corpus", self._seed, int(epoch), int(sample), row) for row in range(self._B)]
        return _windows(self._split.train, np.array(starts), self._T + 1)

    def heldout(self, index: int) -> npt.NDArray[np.int64]:
        """(B, T + 1) held-out token ids; indexes from 0, those from `num_heldout` on begin anew."""
        starts = (index % self.num_heldout * self._B + np.arange(self._B)) * self._T
        return _windows(self._split.heldout, starts, self._T + 1)

    @property
    def num_heldout(self) -> int:
        """Held-out microbatches that do not overlap."""
        return (len(self._split.heldout) - 1) // self._T // self._B

    @property
    def digest(self) -> Digest:
        """Digest of the manifest."""
        return digest(self.manifest_bytes)

    @property
    def manifest_bytes(self) -> bytes:
        """Canonical JSON of the manifest, fit to publish."""
        return canonical(self._split.manifest)

    def token_counts(self) -> npt.NDArray[np.int64]:
        """(V,) how often each token stands in the training text: what the unigram entropy is computed from."""
        return np.bincount(self._split.train, minlength=BYTES_VOCAB).astype(np.int64)


def make_corpus(config: RunConfig) -> SotuCorpus:
    """The corpus that a run is trained on. Raises InvalidConfig."""
    if config.model.vocab_size < BYTES_VOCAB:
        raise InvalidConfig(
            f"model.vocab_size must be at least {BYTES_VOCAB} for the tokenizer bytes, got {config.model.vocab_size}"
        )
    training = config.training
    return SotuCorpus(config.corpus, microbatch_size=training.microbatch_size, num_tokens=training.num_tokens)


def _windows(text: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    windows: npt.NDArray[np.int64] = text[starts[:, None] + np.arange(length)].astype(np.int64)
    return windows


@functools.lru_cache(maxsize=2)
def _load() -> tuple[_Contents, bytes]:
    """The packaged text, each speech checked against its digest."""
    folder = resources.files("subnet.adapters") / "data"
    contents = msgspec.json.decode((folder / "sotu.json").read_bytes(), type=_Contents)
    packed = (folder / "sotu.zst").read_bytes()
    text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=_TEXT_LIMIT_BYTES)
    if len(text) != contents.size_bytes or digest(text) != contents.digest:
        raise InvariantBroken("the packaged text sotu.zst is damaged: install the package again")
    return contents, text


@functools.lru_cache(maxsize=4)
def _split(corpus: CorpusConfig) -> _Split:
    """Whole speeches, drawn until the fraction is reached, are held out; both parts keep the order of time."""
    contents, text = _load()
    heldout: set[str] = set()
    wanted = corpus.heldout_fraction * contents.size_bytes
    reached = 0
    for speech in draws.shuffled(contents.speeches, "heldout", corpus.seed):
        if reached >= wanted:
            break
        heldout.add(speech.name)
        reached += speech.size_bytes
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    at = 0
    for speech in contents.speeches:
        piece = text[at : at + speech.size_bytes]
        if digest(piece) != speech.digest:
            raise InvariantBroken(f"speech {speech.name} of the packaged text is damaged: install the package again")
        parts[speech.name in heldout].append(piece)
        at += speech.size_bytes
    train, test = (np.frombuffer(b"".join(parts[is_heldout]), dtype=np.uint8) for is_heldout in (False, True))
    manifest = Manifest(
        name=contents.name,
        tokenizer=corpus.tokenizer,
        vocab_size=BYTES_VOCAB,
        seed=corpus.seed,
        heldout=tuple(sorted(heldout)),
        num_train_tokens=len(train),
        num_heldout_tokens=len(test),
        speeches=contents.speeches,
    )
    return _Split(manifest, train, test)
