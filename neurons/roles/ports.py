"""What a miner, and what the orchestrator, needs of the world."""

from dataclasses import dataclass

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
    """Adapters of the orchestrator; `compute` is for shards and outer steps that it works out itself."""

    signer: Signer
    store: StateStore
    blobs: BlobStore
    chain: Chain
    compute: Compute
    clock: Clock
