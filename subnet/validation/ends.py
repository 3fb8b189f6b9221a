"""Where an epoch's segments begin and end: at the published params, and in the upload (trust.md 1.3).

Honest training from another start, and another upload than what was trained, both pass a replay; here they show, to the bit.
"""

import numpy as np

from subnet.config import RunConfig
from subnet.errors import ProtocolViolation
from subnet.merging.upload import to_bytes, upload_digest
from subnet.model.partition import num_elements
from subnet.training.checkpoint import read_checkpoint
from subnet.training.outer import decode_snapshot, pseudo_gradient
from subnet.wire import Challenge


def lies_at_an_end(challenge: Challenge) -> bool:
    """Whether the segment is an epoch's first or last."""
    return challenge.segment == 0 or bool(challenge.upload_digest)


def check_ends(config: RunConfig, challenge: Challenge, anchor: bytes, start: bytes, end: bytes) -> None:
    """Raises ProtocolViolation: an epoch that does not begin from the snapshot `anchor`, or an upload that is not its end."""
    anchor_P, _ = decode_snapshot(anchor, num_elements(config, challenge.stage))
    if challenge.segment == 0:
        start_P = read_checkpoint(config, challenge.stage, start).flat_params()
        if not np.array_equal(start_P.view(np.uint32), anchor_P.view(np.uint32)):
            raise ProtocolViolation("the epoch's first checkpoint does not hold the published params")
    if challenge.upload_digest:
        end_P = read_checkpoint(config, challenge.stage, end).flat_params()
        if upload_digest(to_bytes(pseudo_gradient(anchor_P, end_P))) != challenge.upload_digest:
            raise ProtocolViolation("the upload is not what was trained: published params minus the last checkpoint")
