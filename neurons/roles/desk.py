"""What the orchestrator answers or checks at its desk, without the state machine: grants, objects, signatures."""

import re
from collections.abc import Callable

from subnet import receipts, wire
from subnet.errors import Refused
from subnet.orchestration import late, retention, views
from subnet.orchestration.events import DeleteObjects, ObjectsDeleted
from subnet.orchestration.objects import is_digest, object_key
from subnet.orchestration.state import State
from subnet.ports import BlobStore, Clock, Signer
from subnet.types import BlobRef, Hotkey

UPLOAD_KINDS = {"upload": 1, "shard": 1, "snapshot": 2, "checkpoint": 4, "evidence": 0}
"""Kinds of object, and the most float32 vectors of the stage one holds: a checkpoint has params and optimizer state."""
BASE_LIMIT_BYTES = 64 << 20
"""On top of that, for headers, and for evidence: the records of one segment."""
GRANT_LIFE_S = 300.0
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_KEY = re.compile(r"(?=.{1,400}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*(/[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)*")
"""Plain parts joined by slashes: nothing that a store could read as a way out."""


class Desk:
    """Reads the state, which `state` gives and another owns, and never changes it."""

    def __init__(self, *, state: Callable[[], State], signer: Signer, blobs: BlobStore, clock: Clock) -> None:
        self._read_state = state
        self._signer = signer
        self._blobs = blobs
        self._clock = clock

    @property
    def _state(self) -> State:
        return self._read_state()

    async def check(self, sender: Hotkey, request: wire.Request) -> None:
        """Look at what a request claims about the store or a signature, before it is journaled. Raises Refused."""
        match request:
            case wire.UploadDone():
                await self._check_uploaded(sender, request)
            case wire.ReportReduced() | wire.SnapshotDone() | wire.AnswerChallenge():
                await self._check_stored(sender, _refs(request))
            case wire.PostVerdict():
                self._check_verdict(request)
            case wire.PostFlags():
                self._check_flags(request)
            case _:
                pass

    def read(
        self, sender: Hotkey, request: wire.RequestUpload | wire.RequestDownload | wire.GetPeers | wire.GetMergePlan
    ) -> wire.Response:
        """Answer what only reads. Raises Refused."""
        match request:
            case wire.RequestUpload():
                return self.grant_upload(sender, request)
            case wire.RequestDownload():
                return self.grant_download(sender, request)
            case wire.GetPeers():
                return views.stage_peers(self._state, sender, request)
            case wire.GetMergePlan():
                return views.merge_plan(self._state, sender, request)

    def grant_upload(self, sender: Hotkey, request: wire.RequestUpload) -> wire.Response:
        """A presigned URL for an object of the sender's. Raises Refused."""
        if sender not in self._state.members:
            raise Refused("not-joined", "join first: this orchestrator does not know your key")
        if request.kind not in UPLOAD_KINDS or not _NAME.fullmatch(request.name):
            raise Refused(
                "object", f"an object is one of {', '.join(UPLOAD_KINDS)}, named by letters, digits and dashes"
            )
        if not 0 <= request.epoch <= self._state.epoch or not retention.is_kept(self._state, request.epoch):
            raise Refused(
                "object", f"epoch {self._state.epoch} is being worked on; objects belong to it or to a recent one"
            )
        stage = self._state.members[sender].stage
        limit = BASE_LIMIT_BYTES + UPLOAD_KINDS[request.kind] * 4 * self._state.num_elements[stage]
        if not 0 <= request.size_bytes <= limit:
            raise Refused(
                "object", f"an object of kind {request.kind} has at most {limit} bytes, got {request.size_bytes}"
            )
        if not is_digest(request.digest):
            raise Refused("object", "the digest is 64 lower-case hex digits of blake3")
        key = object_key(
            self._state.run_id,
            epoch=request.epoch,
            hotkey=sender,
            kind=request.kind,
            name=request.name,
            content=request.digest,
        )
        ref = BlobRef(key=key, digest=request.digest, size_bytes=request.size_bytes)
        url = self._blobs.upload_url(ref, expires_at_s=self._clock.now() + GRANT_LIFE_S)
        return wire.UploadGrant(ref=ref, url=url)

    def grant_download(self, sender: Hotkey, request: wire.RequestDownload) -> wire.Response:
        """Presigned URLs of the run's objects. Raises Refused."""
        if sender not in self._state.members and sender not in self._state.auditors:
            raise Refused("not-joined", "only miners and validators of this run read its objects")
        if not all(self._is_key(key) for key in request.keys):
            raise Refused("object", f"keys of this run begin with runs/{self._state.run_id}/")
        expires_at_s = self._clock.now() + GRANT_LIFE_S
        return wire.DownloadGrant(
            urls=tuple(self._blobs.download_url(key, expires_at_s=expires_at_s) for key in request.keys)
        )

    async def delete(self, effect: DeleteObjects) -> ObjectsDeleted:
        """Remove what nobody needs any more. Raises TransientFailure."""
        for key in effect.keys:
            await self._blobs.delete(key)
        for folder in effect.folders:
            await self._blobs.delete_under(folder)
        return ObjectsDeleted(at_s=self._clock.now(), epoch=effect.epoch)

    def _is_key(self, key: str) -> bool:
        return key.startswith(f"runs/{self._state.run_id}/") and _KEY.fullmatch(key) is not None

    async def _check_uploaded(self, sender: Hotkey, request: wire.UploadDone) -> None:
        ref = late.committed_upload(self._state, sender, request.epoch)
        if ref is not None and await self._blobs.size(ref.key) != ref.size_bytes:
            raise Refused("upload", "the committed pseudo-gradient is not in the store: upload it first")

    async def _check_stored(self, sender: Hotkey, refs: tuple[BlobRef, ...]) -> None:
        """What a report names must be the sender's own object, whole, and in the store."""
        for ref in refs:
            if not self._is_key(ref.key) or f"/{sender}/" not in ref.key or not ref.key.endswith(f"-{ref.digest}"):
                raise Refused("object", f"{ref.key} is not an object of the sender's")
            if await self._blobs.size(ref.key) != ref.size_bytes:
                raise Refused("object", f"{ref.key} is not in the store with {ref.size_bytes} bytes: upload it first")

    def _check_verdict(self, request: wire.PostVerdict) -> None:
        verdict = request.verdict
        if not self._signer.verify(verdict.validator, receipts.verdict_bytes(verdict), verdict.signature):
            raise Refused("signature", "the verdict is not signed by the validator it names")

    def _check_flags(self, request: wire.PostFlags) -> None:
        for flag in request.flags:
            if not self._signer.verify(flag.validator, receipts.flag_bytes(flag), flag.signature):
                raise Refused("signature", "a flag is not signed by the validator it names")


def _refs(request: wire.ReportReduced | wire.SnapshotDone | wire.AnswerChallenge) -> tuple[BlobRef, ...]:
    match request:
        case wire.ReportReduced():
            return tuple(shard.ref for shard in request.shards)
        case wire.SnapshotDone():
            return (request.ref,)
        case wire.AnswerChallenge():
            return (request.start, request.end, request.evidence)
