"""Snapshots of a published epoch, read by those who only look: which they are by the record, their bytes, their params."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from neurons.exit_codes import ExitCode
from neurons.scoring import Record
from neurons.sources import is_url, layout_of
from subnet.adapters.http_client import open_session
from subnet.adapters.public import HttpPublic
from subnet.config import RunConfig
from subnet.errors import InvariantBroken, NotFound, StartupRefused, TransientFailure
from subnet.frames import digest
from subnet.model.partition import num_elements
from subnet.training.outer import decode_snapshot
from subnet.types import BlobRef, Epoch, StageIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What the record says of one published epoch."""

    run_id: str
    config: RunConfig
    corpus_digest: str
    epoch: Epoch
    snapshots: tuple[BlobRef, ...]


def find_published(record: Record, epoch: int | None) -> Published:
    """The newest published epoch, or `epoch`: what the model was after it; -1 is the model before any training."""
    accounts = record.accounts
    created = accounts.created
    if created is None:
        raise StartupRefused("the record is empty: no segment of it is sealed yet.", ExitCode.CHECK_FAILED)
    known = sorted(index for index, account in accounts.epochs.items() if account.snapshots is not None)
    wanted = epoch if epoch is not None else known[-1] if known else -1
    if wanted != -1 and wanted not in known:
        raise StartupRefused(
            f"epoch {wanted} is not published in the sealed record; published are {', '.join(map(str, known)) or 'none'}.",
            ExitCode.CHECK_FAILED,
        )
    published = accounts.epochs[Epoch(wanted)].snapshots if wanted in known else None
    return Published(
        run_id=created.run_id,
        config=msgspec.json.decode(created.config_json, type=RunConfig),
        corpus_digest=created.corpus_digest,
        epoch=Epoch(wanted),
        snapshots=created.snapshots if published is None else published.snapshots,
    )


async def read_snapshots(target: str, refs: tuple[BlobRef, ...]) -> list[bytes]:
    """Every stage's snapshot, checked against the record. Raises StartupRefused."""
    if not is_url(target):
        blobs = layout_of(target).runs.parent
        found = [await asyncio.to_thread(_stored, blobs / ref.key) for ref in refs]
    else:
        async with open_session() as http:
            public = HttpPublic(http, target)
            found = [await _public(public, stage, ref) for stage, ref in enumerate(refs)]
    for ref, data in zip(refs, found, strict=True):
        if digest(data) != ref.digest:
            raise StartupRefused(
                f"snapshot {ref.key} is not the one in the record. A running subnet publishes only its newest epoch: "
                "leave --epoch out, and try again when an epoch has just been sealed.",
                ExitCode.CHECK_FAILED,
            )
    return found


def _stored(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise StartupRefused(
            f"{path} is not there any more: objects are kept for a few epochs only. Leave --epoch out.",
            ExitCode.CHECK_FAILED,
        ) from None


async def _public(public: HttpPublic, stage: int, ref: BlobRef) -> bytes:
    try:
        return await public.read(f"snapshots/{stage}", limit_bytes=ref.size_bytes)
    except (NotFound, TransientFailure) as error:
        raise StartupRefused(f"the snapshot of stage {stage} cannot be read: {error}.", ExitCode.UNAVAILABLE) from error


def stage_params(config: RunConfig, snapshots: list[bytes]) -> list[npt.NDArray[np.float32]]:
    """Flat params of every stage. Raises InvariantBroken (not one for each), ProtocolViolation (no snapshot of its stage)."""
    if len(snapshots) != config.training.num_stages:
        raise InvariantBroken(f"{len(snapshots)} snapshots for {config.training.num_stages} stages")
    return [decode_snapshot(data, num_elements(config, StageIndex(stage)))[0] for stage, data in enumerate(snapshots)]
