"""In which order a validator does its work: what it cannot get holds up nothing else."""

import asyncio
from dataclasses import dataclass, field

from neurons.roles.validator import Validator, ValidatorPorts
from neurons.virtual import SILENT
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.corpus import make_corpus
from subnet.adapters.memory import InlineCompute, MemoryBlobs, MemoryBlobStore
from subnet.adapters.memory_chain import MemoryChainConfig, MemoryChainState
from subnet.frames import digest
from subnet.ports import Clock
from subnet.sim.loop import VirtualClock, run
from subnet.sim.network import Network, NetworkConfig, SimPublic
from subnet.types import BlobRef, Checkpoint, Epoch, Hotkey, Outcome, Phase, StageIndex
from tests.sim.world import CONFIG

ME = KeypairSigner.from_uri("//validator", deterministic=True)
OWNER = Hotkey("owner")
PRESENTED = b"neither a checkpoint nor records"


@dataclass
class Desk:
    """An orchestrator that has one thing to say, and keeps what it is told."""

    directive: wire.Directive
    store: MemoryBlobStore
    clock: Clock
    verdicts: list[wire.PostVerdict] = field(default_factory=list)

    async def call(self, request: wire.Request, *, timeout_s: float = 30.0) -> wire.Response:
        match request:
            case wire.Poll():
                if request.known_version == self.directive.version:
                    await self.clock.sleep(request.wait_s)
                return self.directive
            case wire.RequestDownload():
                urls = tuple(self.store.download_url(key, expires_at_s=1e12) for key in request.keys)
                return wire.DownloadGrant(urls=urls)
            case wire.PostVerdict():
                self.verdicts.append(request)
                return wire.Done()
            case _:
                return wire.Done()


def challenge(hotkey: str, *, key: str) -> wire.Challenge:
    """Of an epoch's middle, whose three objects are the same one."""
    ref = BlobRef(key=key, digest=digest(PRESENTED), size_bytes=len(PRESENTED))
    end = Checkpoint(digest=ref.digest, num_steps=0, num_receipts=0, head=digest(b""))
    return wire.Challenge(
        epoch=Epoch(0),
        hotkey=Hotkey(hotkey),
        stage=StageIndex(1),
        segment=1,
        start_checkpoint=end,
        end_checkpoint=end,
        deadline_s=1e12,
        start=ref,
        end=ref,
        evidence=ref,
    )


async def judged(directive: wire.Directive, clock: VirtualClock) -> list[wire.PostVerdict]:
    """What a validator has posted a minute after it was told this."""
    store = MemoryBlobStore(clock)
    await store.put("runs/r/there", PRESENTED)
    desk = Desk(directive, store, clock)
    validator = Validator(
        config=CONFIG,
        discovery=wire.Discovery(u="sim://o", r="r", v=wire.PROTOCOL_VERSION, c=digest(b"config")),
        owner=OWNER,
        noise=SILENT,
        ports=ValidatorPorts(
            signer=ME,
            control=desk,
            blobs=MemoryBlobs(store),
            public=SimPublic(Network(NetworkConfig(), seed=0, clock=clock)),
            chain=MemoryChainState(clock, MemoryChainConfig(), owner_hotkey=OWNER).view(ME.hotkey),
            corpus=make_corpus(CONFIG),
            compute=InlineCompute(),
            clock=clock,
        ),
    )
    working = asyncio.create_task(validator.run())
    await clock.sleep(60.0)
    assert not working.done()
    working.cancel()
    return desk.verdicts


def test_objects_that_cannot_be_had_hold_up_no_other_audit() -> None:
    lost = BlobRef(key="runs/r/lost", digest=digest(b"lost"), size_bytes=4)
    directive = wire.Directive(
        version=1,
        epoch=Epoch(1),
        phase=Phase.TRAINING,
        phase_deadline_s=1e12,
        challenges=(challenge("a", key="runs/r/lost"), challenge("b", key="runs/r/there")),
        evaluate_epoch=Epoch(0),
        snapshots=(lost, lost, lost),
    )

    async def story() -> list[wire.PostVerdict]:
        return await judged(directive, VirtualClock())

    (verdict,) = run(story())
    assert (verdict.verdict.hotkey, verdict.verdict.outcome) == ("b", Outcome.FAIL)
