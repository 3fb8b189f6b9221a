"""Evidence on the wire."""

import pytest

from subnet.errors import ProtocolViolation
from subnet.frames import digest
from subnet.types import NO_DIGEST, Direction, Epoch, Receipt, SampleId, StageIndex
from subnet.validation.evidence import Evidence, decode_evidence, encode_evidence, payloads_named
from tests.numerics.support import small_config

PAYLOADS = {digest(data): data for data in (b"in", b"out")}
LIMIT = 1 << 20


def receipt(direction: Direction = Direction.FORWARD, stage: int = 1) -> Receipt:
    return Receipt(
        run_id="run",
        epoch=Epoch(0),
        sample=SampleId(3),
        branch=0,
        stage=StageIndex(stage),
        direction=direction,
        params_version=0,
        input_digest=digest(b"in"),
        output_digest=digest(b"out"),
    )


def test_what_was_encoded_is_decoded_and_the_same_bytes_come_out() -> None:
    evidence = Evidence(receipts=(receipt(),), payloads=PAYLOADS)
    data = encode_evidence(evidence)
    assert decode_evidence(data, limit_bytes=len(data)) == evidence
    assert encode_evidence(Evidence(receipts=(receipt(),), payloads=dict(reversed(PAYLOADS.items())))) == data


@pytest.mark.parametrize(
    ("direction", "stage", "names"),
    [
        (Direction.FORWARD, 0, (digest(b"out"),)),
        (Direction.FORWARD, 1, (digest(b"in"), digest(b"out"))),
        (Direction.FORWARD, 2, (digest(b"in"),)),
        (Direction.BACKWARD, 0, (digest(b"in"),)),
        (Direction.BACKWARD, 1, (digest(b"in"), digest(b"out"))),
        (Direction.BACKWARD, 2, (digest(b"out"),)),
        (Direction.STEP, 1, ()),
        (Direction.DROP, 1, ()),
    ],
)
def test_payloads_that_a_receipt_needs(direction: Direction, stage: int, names: tuple[str, ...]) -> None:
    assert payloads_named(small_config(), receipt(direction, stage)) == names
    assert NO_DIGEST not in names


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "does not decode"),
        (b"\x93\x01\x02\x03", "does not decode"),
        (encode_evidence(Evidence(receipts=(receipt(),), payloads={}))[:-1], "does not decode"),
        (encode_evidence(Evidence(receipts=(receipt(),), payloads={})) + b"\x00", "does not decode"),
        (b"\x91" * 100_000, "does not decode"),
        (encode_evidence(Evidence(receipts=(receipt(),), payloads={digest(b"more"): b"more"})), "no receipt names"),
        (bytes(LIMIT + 1), "limit 1048576"),
    ],
)
def test_bad_evidence_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        decode_evidence(data, limit_bytes=LIMIT)
