"""What a miner, and what the orchestrator, needs of the world."""

from collections.abc import Callable
from dataclasses import dataclass

from subnet.errors import TransientFailure
from subnet.ports import Blobs, BlobStore, Chain, Clock, Compute, Control, Corpus, Disk, Peers, Signer, StateStore


@dataclass(frozen=True, slots=True)
class MinerPorts:
    """Adapters of one miner, picked by the wiring or by the simulation."""

    signer: Signer
    control: Control
    peers: Peers
    blobs: Blobs
    disk: Disk
    corpus: Corpus
    compute: Compute
    clock: Clock


@dataclass(frozen=True, slots=True)
class OrchestratorPorts:
    """Adapters of the orchestrator; `compute` is for shards and outer steps that it works out itself.

    `may_lead` says whether another orchestrator cannot lead the run by now, as far as can be told without asking.
    """

    signer: Signer
    store: StateStore
    blobs: BlobStore
    chain: Chain
    compute: Compute
    clock: Clock
    may_lead: Callable[[], bool]

    def require_lead(self) -> None:
        """Before anything that the journal does not fence. Raises TransientFailure when another may lead by now."""
        if not self.may_lead():
            raise TransientFailure("this orchestrator was held up for longer than its lease; another may lead by now")
