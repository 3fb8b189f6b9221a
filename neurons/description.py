"""What the nodes of a run agree on, and the digest by which the owner's on-chain record pins it."""

from incentives.config import IncentiveConfig
from subnet import wire
from subnet.config import RunConfig, config_bytes
from subnet.frames import digest
from subnet.types import Digest


def description(config: RunConfig, incentives: IncentiveConfig, corpus_digest: Digest) -> bytes:
    """All that the nodes of a run agree on, one line each: the public object `config`."""
    return b"\n".join((config_bytes(config), wire.encode(incentives), corpus_digest.encode()))


def config_digest(config: RunConfig, incentives: IncentiveConfig, corpus_digest: Digest) -> Digest:
    """Digest of the description: what the owner's on-chain record pins."""
    return digest(description(config, incentives, corpus_digest))
