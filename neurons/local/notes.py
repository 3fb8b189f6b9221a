"""Files that the processes of a local subnet leave for the report; one that is missing or half-written counts as not there."""

from pathlib import Path
from typing import TypeVar

import msgspec

from subnet.types import Epoch, Record

T = TypeVar("T")


class Text(Record, frozen=True):
    """Nats for each token of held-out text under the frequencies of training text."""

    unigram: float


class Progress(Record, frozen=True, tag_field="line", tag=True):
    """Samples trained on so far, and the loss of the newest before it was learned from."""

    num_samples: int
    loss: float


class Trained(Record, frozen=True, tag_field="line", tag=True):
    """The last line: held-out loss of the trained model."""

    num_samples: int
    heldout_loss: float


class Repeated(Record, frozen=True):
    """For each stage, whether a round that was repeated in one process came to the published params."""

    epoch: Epoch
    same: tuple[bool, ...]


class MergeCount(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes of one miner in one merge; compared with 4W + 2W/N (papers.md A6)."""

    epoch: int
    num_miners: int
    vector_bytes: int
    sent: int
    received: int

    @property
    def ratio(self) -> float:
        """Bytes sent and received over 4W + 2W/N."""
        expected = 4 * self.vector_bytes + 2 * self.vector_bytes / max(1, self.num_miners)
        return (self.sent + self.received) / expected


class MovedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes of one miner through the blob store, by kind of object."""

    sent: dict[str, int] = {}
    received: dict[str, int] = {}

    @property
    def total(self) -> int:
        """Both ways."""
        return sum((*self.sent.values(), *self.received.values()))


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a miner sent since its process began."""

    activation_payload_bytes_sent: int = 0
    gradient_payload_bytes_sent: int = 0
    frame_head_bytes_sent: int = 0
    passes_sent: int = 0
    frames_detoured: int = 0
    """Of those, through the blob store."""
    detoured_payload_bytes_sent: int = 0
    frames_lost: int = 0
    frames_refused: int = 0
    merges: tuple[MergeCount, ...] = ()
    moved: MovedBytes = MovedBytes()


def read_unigram(path: Path) -> float | None:
    """The unigram entropy in nats, None while it is not measured."""
    text = _read(path, Text)
    return text.unigram if text else None


def read_training(path: Path) -> Progress | Trained | None:
    """The newest line of a reference training, None before the first."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    kind: object = Progress | Trained
    return msgspec.json.decode(lines[-1], type=kind) if lines else None


def read_repeated(path: Path) -> tuple[Repeated, ...]:
    """The rounds repeated so far."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return tuple(msgspec.json.decode(line, type=Repeated) for line in lines)


def read_counters(directory: Path) -> Counters | None:
    """A miner's counters, None when it left none."""
    return _read(directory / "counters.json", Counters)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):  # killed before it wrote
        return None
