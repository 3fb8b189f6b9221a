"""Cheats that no drawn replay has to meet first: their losses stand out, or their agreeing copies are recomputed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from neurons.checks import History
from neurons.roles.ports import MinerPorts
from neurons.trust_checks import check_audit_draws, check_flags, check_shard_audits
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.frames import digest
from subnet.orchestration.ledger import CaseClosed, Challenged, Flagged, ReducerConvicted, ShardAudited, UploadCopied
from subnet.types import Digest, Epoch, Outcome
from tests.attacks.support import NUM_MINERS, TWO_A_STAGE, Trial, with_ports, with_worker
from tests.sim.world import NUM_STAGES, altered, epochs
from tests.strategies import FalseLoss, storing_zeros

UNAUDITED = altered(
    TWO_A_STAGE,
    training={"num_epochs": 3, "target_batches": 24},
    audit={"probability": 0.0, "probation_epochs": 0},
    merge={"audit_fraction": 0.0},
)
"""No audit is drawn by chance."""


def check_outsider(trial: Trial) -> None:
    """Whoever reads the record comes to the same flags and the same drawn shards."""
    history = History(owner=trial.result.hotkeys["orchestrator"], record=trial.result.record)
    verify = KeypairSigner.from_uri("//reader").verify
    for finding in (check_audit_draws(history), check_flags(history, verify), check_shard_audits(history)):
        assert finding.holds, finding


@dataclass(frozen=True, slots=True)
class Copying:
    """Two miners of one owner: the first shows its upload to the second, which commits to it as its own."""

    ports: MinerPorts
    commits: dict[Epoch, wire.CommitEpoch]
    uploads: dict[Digest, bytes]
    granted: dict[str, Digest]
    is_copier: bool

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        if isinstance(request, wire.CommitEpoch):
            request = await self._commitment(request)
        if self.is_copier and isinstance(request, wire.RequestUpload) and request.kind == "upload":
            return await self._grant(request)
        return await self.ports.control.call(request, timeout_s=timeout_s)

    async def _commitment(self, own: wire.CommitEpoch) -> wire.CommitEpoch:
        if not self.is_copier:
            self.commits[own.epoch] = own
            return own
        await self._until(lambda: own.epoch in self.commits)
        shown = self.commits[own.epoch]
        return msgspec.structs.replace(own, upload_digest=shown.upload_digest, chunk_digests=shown.chunk_digests)

    async def _grant(self, own: wire.RequestUpload) -> wire.Response:
        copied = self.commits[own.epoch].upload_digest
        await self._until(lambda: copied in self.uploads)
        grant = await self.ports.control.call(msgspec.structs.replace(own, digest=copied))
        if isinstance(grant, wire.UploadGrant):
            self.granted[grant.url] = copied
        return grant

    async def put(self, url: str, data: bytes) -> None:
        self.uploads[digest(data)] = data
        await self.ports.blobs.put(url, self.uploads[self.granted[url]] if url in self.granted else data)

    async def get(self, url: str, *, start: int = 0, size_bytes: int | None = None, limit_bytes: int) -> bytes:
        return await self.ports.blobs.get(url, start=start, size_bytes=size_bytes, limit_bytes=limit_bytes)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self.ports.clock.sleep(0.05)


def copying() -> tuple[Callable[[MinerPorts], MinerPorts], Callable[[MinerPorts], MinerPorts]]:
    """The one who is copied, and the one who copies."""
    commits: dict[Epoch, wire.CommitEpoch] = {}
    uploads: dict[Digest, bytes] = {}

    def make(ports: MinerPorts, *, is_copier: bool) -> MinerPorts:
        liar = Copying(ports, commits, uploads, {}, is_copier)
        return replace(ports, control=liar, blobs=liar)

    return partial(make, is_copier=False), partial(make, is_copier=True)


def test_a_copied_update_is_seen_in_the_commitments_and_earns_neither_anything() -> None:
    trial = with_ports(*copying(), stage=1, config=altered(UNAUDITED, training={"num_epochs": 2, "target_batches": 8}))
    copies = [fact for fact in trial.facts if isinstance(fact, UploadCopied)]
    assert [(fact.epoch, set(fact.pair), fact.share > 0.5) for fact in copies] == [
        (epoch, set(trial.cheats), True) for epoch in range(2)
    ]
    assert not set(trial.result.expected) & trial.cheats
    assert len(trial.result.expected) == NUM_MINERS - 2
    assert all(not account.snapshots.participants[1] for account in epochs(trial.result) if account.snapshots)
    check_outsider(trial)


def test_a_false_loss_is_flagged_audited_and_convicted() -> None:
    trial = with_worker(FalseLoss, stage=NUM_STAGES - 1, config=UNAUDITED)
    (cheat,) = trial.cheats
    flags = [fact.flag for fact in trial.facts if isinstance(fact, Flagged)]
    assert {flag.hotkey for flag in flags} >= {cheat}
    challenged = [fact for fact in trial.facts if isinstance(fact, Challenged)]
    assert {fact.hotkey for fact in challenged} <= {flag.hotkey for flag in flags}
    assert min(fact.epoch for fact in challenged) >= 1
    closed = [fact for fact in trial.facts if isinstance(fact, CaseClosed) and fact.outcome == Outcome.FAIL]
    assert {fact.hotkey for fact in closed} == {cheat}
    trial.check_cheat_earns_less()
    check_outsider(trial)


def test_colluding_reducers_are_convicted_by_the_recomputed_shard() -> None:
    """Both miners of a stage store the same zeros: their copies agree, and no comparison can see it."""
    config = altered(UNAUDITED, training={"target_batches": 8}, merge={"audit_fraction": 1.0})
    trial = with_ports(storing_zeros("shard"), storing_zeros("shard"), stage=0, config=config)
    convicted = [fact for fact in trial.facts if isinstance(fact, ReducerConvicted)]
    assert {fact.hotkey for fact in convicted} == trial.cheats
    assert {fact.epoch for fact in convicted} >= {0}
    audited = [fact for fact in trial.facts if isinstance(fact, ShardAudited)]
    assert {fact.stage for fact in audited if fact.recomputed.digest != fact.accepted.digest} == {0}
    assert len(trial.result.expected) == NUM_MINERS - 2
    assert not [fact for fact in trial.facts if isinstance(fact, UploadCopied)]
    assert all(account.is_published for account in epochs(trial.result))
    check_outsider(trial)
