"""What a miner needs of the world."""

from dataclasses import dataclass

from subnet.ports import Blobs, Clock, Compute, Control, Corpus, Disk, Peers, Signer


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
