"""Where a run's objects lie in the blob store: keys are made by the orchestrator alone (trust.md 6)."""

import re

from subnet.types import Digest

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether a key may end in it: 64 lower-case hex digits, as of blake3."""
    return _DIGEST.fullmatch(text) is not None


def object_key(run_id: str, *, epoch: int, hotkey: str, kind: str, name: str, content: Digest) -> str:
    """Where an object lies: unique to the content."""
    return f"{folder(run_id, epoch=epoch, kind=kind)}/{hotkey}/{name}-{content}"


def copy_key(key: str, *, hotkey: str) -> str:
    """Where another's object lies that has the same kind, name and content as the one under `key`."""
    *before, _, name = key.split("/")
    return "/".join((*before, hotkey, name))


def folder(run_id: str, *, epoch: int, kind: str) -> str:
    """What the keys of an epoch's objects of one kind begin with."""
    return f"{epoch_folder(run_id, epoch=epoch)}/{kind}"


def epoch_folder(run_id: str, *, epoch: int) -> str:
    """What the keys of all objects of an epoch begin with."""
    return f"runs/{run_id}/e{epoch}"


def folder_of(key: str) -> str:
    """The `epoch_folder` in which an object lies."""
    return "/".join(key.split("/")[:3])
