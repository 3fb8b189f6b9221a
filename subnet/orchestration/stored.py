"""The orchestrator's whole state as bytes, so that it starts from them and not from its journal's first entry.

Layout: magic, blake3 of all that follows, version (u16), length of the writer's name (u16), that name, then msgpack. Fields stand
by name, mappings in their order: the same state gives the same bytes, and the decoded state goes on as the encoded one would.
"""

import dataclasses
import struct

import blake3
import msgspec

from subnet import wire
from subnet.errors import DamagedState, OtherVersion
from subnet.orchestration.state import ShardAudit, State
from subnet.types import BlobRef, Epoch, StageIndex

VERSION = 2
"""Grows whenever a field of the state, or of anything in it, comes, goes, or changes its name, type or meaning."""
READABLE = (1, VERSION)
"""Versions that `decode_state` takes. An older one stays where every field that it lacks has a default right for it."""
_MAGIC = b"STRS"
_DIGEST_BYTES = 32
_HEAD = struct.Struct("<HH")


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """The state without its shard audits, and these apart, as merge plans by epoch and stage and accepted shards.

    All audits of one merge share its plan, which names every chunk of every upload: written once, not once for each shard.
    """

    state: State
    plans: dict[tuple[Epoch, StageIndex], wire.MergePlan]
    accepted: dict[tuple[Epoch, StageIndex, int], BlobRef]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


def encode_state(state: State, *, written_by: str) -> bytes:
    """`state` as bytes; `written_by` names the version of the software, for the message of one that cannot read them."""
    audits = state.shard_audits
    stored = _Stored(
        state=dataclasses.replace(state, shard_audits={}),
        plans={(epoch, stage): audit.plan for (epoch, stage, _), audit in audits.items()},
        accepted={key: audit.accepted for key, audit in audits.items()},
    )
    writer = written_by.encode()
    body = b"".join((_HEAD.pack(VERSION, len(writer)), writer, _encoder.encode(stored)))
    return b"".join((_MAGIC, blake3.blake3(body).digest(), body))


def decode_state(data: bytes) -> State:
    """Inverse of `encode_state`. Raises DamagedState, OtherVersion."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = memoryview(data)[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != blake3.blake3(body).digest():
        raise DamagedState(
            "the stored state is damaged: its bytes are not those that were written. Nothing was changed.\n"
            "Restore the state store from a backup, or point --state-url at its replica."
        )
    version, writer_length = _HEAD.unpack_from(body)
    writer = bytes(body[_HEAD.size : _HEAD.size + writer_length]).decode()
    if version not in READABLE:
        raise OtherVersion(
            f"the stored state is of version {version}, written by Strata {writer}; this software reads "
            f"{', '.join(map(str, READABLE))}.\n"
            f"Nothing was changed. Start Strata {writer}, or one that says in its change log that it reads version {version}."
        )
    try:
        stored = _decoder.decode(body[_HEAD.size + writer_length :])
    except msgspec.DecodeError as error:
        raise OtherVersion(
            f"the stored state was written by Strata {writer} and does not fit this software: {error}.\n"
            f"Nothing was changed. Start Strata {writer}."
        ) from error
    for (epoch, stage, shard), accepted in stored.accepted.items():
        stored.state.shard_audits[epoch, stage, shard] = ShardAudit(plan=stored.plans[epoch, stage], accepted=accepted)
    return stored.state
