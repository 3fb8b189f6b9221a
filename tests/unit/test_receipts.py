import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import receipts
from subnet.types import (
    Digest,
    Direction,
    Epoch,
    Hotkey,
    Lease,
    Outcome,
    Receipt,
    SampleId,
    StageIndex,
    Verdict,
)

ROOT = Path(__file__).parents[2]
RUN, EPOCH, KEY = "run", Epoch(2), Hotkey("5A")


def receipt(sample: int, /, **changes: object) -> Receipt:
    base = Receipt(
        run_id=RUN,
        epoch=EPOCH,
        sample=SampleId(sample),
        branch=0,
        stage=StageIndex(1),
        direction=Direction.FORWARD,
        params_version=4,
        input_digest=Digest("a" * 64),
        output_digest=Digest("b" * 64),
    )
    return msgspec.structs.replace(base, **changes)


CHAIN = [receipt(number) for number in range(6)]
START = receipts.first_head(RUN, EPOCH, KEY)
LEASE = Lease(
    run_id=RUN, epoch=EPOCH, sample=SampleId(1), branch=0, attempt=0, hops=(KEY,), deadline_s=9.5, signature="aa"
)
VERDICT = Verdict(
    run_id=RUN,
    epoch=EPOCH,
    hotkey=KEY,
    segment=1,
    validator=Hotkey("5V"),
    outcome=Outcome.PASS,
    reason="",
    signature="bb",
)


def test_known_heads() -> None:
    """Written down once: a head that changes cuts off every record made before."""
    assert START == "2cdf1cebd0fed53e3bc8caed4315374909849997ba30fa0e4e8f7594a738b2e1"
    assert receipts.extend(START, CHAIN) == "80502bead6ef8f865e83fc8719234d64d8fe36a0732ed1f07dbc35bc88c413ad"
    assert (
        receipts.merkle_root([b"a", b"b", b"c"]) == "5787bd74753ce1413c4a6fc9c4eee7d9f8a35db552d6553887aced33db647717"
    )


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_heads_do_not_depend_on_the_hash_seed(hash_seed: str) -> None:
    code = (
        "from subnet import receipts; print(receipts.first_head('run', 2, '5A'), receipts.canonical({'b': 1, 'a': 2}))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [START, 'b\'{"a":2,"b":1}\'']


def test_a_canonical_record_has_one_spelling() -> None:
    assert receipts.canonical({"b": 1, "a": [1.5, None]}) == b'{"a":[1.5,null],"b":1}'
    assert receipts.canonical(LEASE).startswith(b'{"run_id":"run","epoch":2,')


@given(cut=st.integers(0, 6))
def test_a_chain_can_be_extended_in_parts(cut: int) -> None:
    assert receipts.extend(receipts.extend(START, CHAIN[:cut]), CHAIN[cut:]) == receipts.extend(START, CHAIN)


@given(order=st.permutations(range(6)))
def test_a_head_depends_on_the_order(order: list[int]) -> None:
    same = receipts.extend(START, [CHAIN[at] for at in order]) == receipts.extend(START, CHAIN)
    assert same == (order == sorted(order))


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "other"},
        {"epoch": Epoch(3)},
        {"sample": SampleId(9)},
        {"branch": 1},
        {"stage": StageIndex(2)},
        {"direction": Direction.BACKWARD},
        {"params_version": 5},
        {"input_digest": Digest("c" * 64)},
        {"output_digest": Digest("c" * 64)},
        {"loss": 0.5},
    ],
)
def test_a_head_depends_on_every_field(changes: dict[str, object]) -> None:
    assert receipts.next_head(START, receipt(1, **changes)) != receipts.next_head(START, receipt(1))


def test_each_miner_and_epoch_starts_its_own_chain() -> None:
    heads = {
        receipts.first_head(run, epoch, key)
        for run in ("run", "run2")
        for epoch in (Epoch(1), Epoch(12))
        for key in (KEY, Hotkey("5B"))
    }
    assert len(heads) == 8


@given(leaves=st.lists(st.binary(max_size=4), max_size=12), other=st.lists(st.binary(max_size=4), max_size=12))
def test_a_root_stands_for_its_leaves(leaves: list[bytes], other: list[bytes]) -> None:
    assert (receipts.merkle_root(leaves) == receipts.merkle_root(other)) == (leaves == other)


def test_a_node_cannot_pass_for_a_leaf() -> None:
    inner = receipts.merkle_root([b"a", b"b"])
    assert receipts.merkle_root([b"a", b"b", b"c"]) != receipts.merkle_root([inner.encode(), b"c"])
    assert receipts.merkle_root([b"a", b"b", b"b"]) != receipts.merkle_root([b"a", b"b", b"b", b"b"])
    assert receipts.merkle_root([]) != receipts.merkle_root([b""])


def test_what_is_signed_leaves_the_signature_out_and_nothing_else() -> None:
    unsigned = msgspec.structs.replace(LEASE, signature="")
    assert receipts.lease_bytes(LEASE) == receipts.lease_bytes(unsigned)
    assert receipts.lease_bytes(LEASE) != receipts.lease_bytes(msgspec.structs.replace(LEASE, attempt=1))
    assert receipts.verdict_bytes(VERDICT) == receipts.verdict_bytes(msgspec.structs.replace(VERDICT, signature=""))
    changed = msgspec.structs.replace(VERDICT, outcome=Outcome.FAIL)
    assert receipts.verdict_bytes(VERDICT) != receipts.verdict_bytes(changed)


def test_signatures_of_one_kind_do_not_fit_another() -> None:
    ack = receipts.ack_bytes(RUN, epoch=EPOCH, hotkey=KEY, num_receipts=6, head=START)
    kinds = [message.split(b"\n")[0] for message in (ack, receipts.lease_bytes(LEASE), receipts.verdict_bytes(VERDICT))]
    assert kinds == [b"strata/ack/1", b"strata/lease/1", b"strata/verdict/1"]
    assert ack != receipts.ack_bytes(RUN, epoch=EPOCH, hotkey=KEY, num_receipts=7, head=START)
