"""Commit-reveal of weights, version 4: sealed by drand timelock, opened by the chain an epoch later (chain.md 2).

A commit belongs to the epoch index at which it was made and is due `RevealPeriodEpochs` later; without the
beacon's pulse it waits until that epoch is over, then it is void.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import bittensor_core

from subnet.devnet.codec import SS58_FORMAT
from subnet.devnet.context import Context, DispatchFailure
from subnet.devnet.pallets import weights
from subnet.devnet.scale import Reader, vector
from subnet.errors import ProtocolViolation

log = logging.getLogger(__name__)

_VERSION = 4
_MAX_UNREVEALED = 10


@dataclass(frozen=True, slots=True)
class _Payload:
    """What a validator sealed; the hotkey inside keeps others from sending it again as theirs."""

    hotkey: str
    uids: list[int]
    values: list[int]
    version_key: int


def reveal_due(ctx: Context, netuid: int, *, epoch: int) -> None:
    """Open what is due in `epoch` and has a pulse; drop what was due before."""
    due = epoch - ctx.get("RevealPeriodEpochs", netuid)
    for (_, at_epoch), commits in ctx.entries("SubtensorModule", "TimelockedWeightCommits", netuid):
        if at_epoch < due:
            ctx.put("TimelockedWeightCommits", None, netuid, at_epoch)
        elif at_epoch == due:
            waiting = [commit for commit in commits if not _reveal(ctx, netuid, *commit)]
            ctx.put("TimelockedWeightCommits", waiting or None, netuid, at_epoch)


def add_pulse(ctx: Context, drand_round: int, signature: str) -> None:
    """Store a pulse of the beacon, as the chain's offchain worker does."""
    randomness = hashlib.sha256(bytes.fromhex(signature)).hexdigest()
    pulse = {"round": drand_round, "randomness": "0x" + randomness, "signature": "0x" + signature}
    ctx.write("Drand", "Pulses", pulse, drand_round)
    newest = max(drand_round, ctx.read("Drand", "LastStoredRound"))
    ctx.write("Drand", "LastStoredRound", newest)


def _reveal(ctx: Context, netuid: int, hotkey: str, at_block: int, sealed: Any, drand_round: int) -> bool:
    """Whether this commit is done with: applied, or found to be worthless."""
    pulse = ctx.read("Drand", "Pulses", drand_round)
    if pulse is None:
        return False
    ctx.state.begin()
    try:
        payload = _opened(_bytes(sealed), drand_round, pulse["signature"])
        if payload.hotkey != hotkey:
            raise ProtocolViolation("sealed for another hotkey")
        weights.apply_weights(
            ctx,
            netuid,
            hotkey,
            payload.uids,
            payload.values,
            version_key=payload.version_key,
            is_reveal=True,
        )
    except (ProtocolViolation, DispatchFailure) as error:
        ctx.state.rollback()
        log.info("weights not revealed", extra={"netuid": netuid, "hotkey": hotkey, "reason": str(error)})
    else:
        ctx.state.commit()
        ctx.emit("SubtensorModule", "TimelockedWeightsRevealed", [netuid, hotkey])
    return True


def _opened(sealed: bytes, drand_round: int, signature: str) -> _Payload:
    envelope = vector(sealed) + drand_round.to_bytes(8, "little")
    try:
        reader = Reader(bittensor_core.decrypt_with_signature(envelope, signature.removeprefix("0x")))
    except ValueError as error:
        raise ProtocolViolation(f"does not open with the pulse of round {drand_round}: {error}") from error
    public_key = reader.vector()
    uids = [reader.integer(2) for _ in range(reader.compact())]
    values = [reader.integer(2) for _ in range(reader.compact())]
    hotkey = bittensor_core.ss58_encode(public_key, SS58_FORMAT) if len(public_key) == 32 else ""
    return _Payload(hotkey, uids, values, reader.integer(8))


def _commit(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    netuid, sealed, drand_round = args["netuid"], _bytes(args["commit"]), args["reveal_round"]
    is_known = args.get("mecid", 0) < weights.MECHANISMS and ctx.get("NetworksAdded", netuid)
    ctx.require(is_known, "MechanismDoesNotExist")
    ctx.require(ctx.get("CommitRevealWeightsEnabled", netuid), "CommitRevealDisabled")
    uid = ctx.get("Uids", netuid, who)
    ctx.require(uid is not None, "HotKeyNotRegisteredInSubNet")
    ctx.require(args["commit_reveal_version"] == _VERSION, "IncorrectCommitRevealVersion")
    weights.check_rate(ctx, netuid, uid, "CommittingWeightsTooFast")
    ctx.require(drand_round > ctx.read("Drand", "LastStoredRound"), "InvalidRevealRound")
    epoch = ctx.get("SubnetEpochIndex", netuid)
    unrevealed = [
        commit
        for _, commits in ctx.entries("SubtensorModule", "TimelockedWeightCommits", netuid)
        for commit in commits
        if commit[0] == who
    ]
    ctx.require(len(unrevealed) < _MAX_UNREVEALED, "TooManyUnrevealedCommits")
    present = [list(commit) for commit in ctx.get("TimelockedWeightCommits", netuid, epoch)]
    added = [who, ctx.block, "0x" + sealed.hex(), drand_round]
    ctx.put("TimelockedWeightCommits", [*present, added], netuid, epoch)
    ctx.put_at("LastUpdate", netuid, uid, ctx.block)
    digest = "0x" + hashlib.blake2b(sealed, digest_size=32).hexdigest()
    ctx.emit("SubtensorModule", "TimelockedWeightsCommitted", [who, netuid, digest, drand_round])


def _bytes(value: Any) -> bytes:
    """Bytes that the codec shows as hex, or as text when they happen to be text."""
    if isinstance(value, str):
        return bytes.fromhex(value[2:]) if value.startswith("0x") else value.encode()
    return bytes(value)


CALLS = {
    ("SubtensorModule", "commit_timelocked_weights"): _commit,
    ("SubtensorModule", "commit_timelocked_mechanism_weights"): _commit,
}
