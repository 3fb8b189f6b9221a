from collections.abc import Callable
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from subnet import wire
from subnet.errors import ProtocolViolation
from subnet.types import Digest, Direction, Epoch, Message, Receipt, SampleId, StageIndex

REQUESTS: tuple[type[Message], ...] = get_args(wire.Request)
RESPONSES: tuple[type[Message], ...] = get_args(wire.Response)

SIMPLE: dict[type[inspect.Type], st.SearchStrategy[object]] = {
    inspect.StrType: st.text(max_size=6),
    inspect.IntType: st.integers(-(1 << 63), (1 << 63) - 1),
    inspect.FloatType: st.floats(allow_nan=False, allow_infinity=False),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}


def structs(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a message type, built from its fields."""
    information = inspect.type_info(kind)
    assert isinstance(information, inspect.StructType)
    return st.builds(kind, **{field.name: values(field.type) for field in information.fields})


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    match kind:
        case inspect.StructType(cls=cls):
            return structs(cls)
        case inspect.EnumType(cls=cls):
            return st.sampled_from(list(cls))
        case inspect.UnionType(types=types):
            return st.one_of([values(member) for member in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case _:
            return SIMPLE[type(kind)]


def names(kinds: tuple[type, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.__name__)


@names(REQUESTS)
@given(data=st.data())
def test_every_request_round_trips_in_its_envelope(kind: type[Message], data: st.DataObject) -> None:
    envelope = wire.Envelope(request_id="id", request=data.draw(structs(kind)))
    body = wire.encode(envelope)
    assert wire.decode(wire.Envelope, body) == envelope
    assert wire.encode(wire.decode(wire.Envelope, body)) == body


@names(RESPONSES)
@given(data=st.data())
def test_every_response_round_trips(kind: type[Message], data: st.DataObject) -> None:
    response = data.draw(structs(kind))
    decoded: object = wire.decode(wire.Response, wire.encode(response))  # type: ignore[arg-type]  # a union is no type
    assert decoded == response
    assert type(decoded) is kind


@given(record=structs(wire.Discovery))
def test_the_record_on_chain_round_trips(record: wire.Discovery) -> None:
    assert wire.decode(wire.Discovery, wire.encode(record)) == record


def test_every_kind_has_its_own_tag() -> None:
    kinds = [*REQUESTS, *RESPONSES]
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    assert set(wire.READS) < set(REQUESTS)


@given(body=st.binary(max_size=200))
def test_random_bytes_only_raise_a_violation(body: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        wire.decode(wire.Envelope, body)


@given(at=st.integers(0, 80), removed=st.integers(0, 4), put=st.binary(max_size=4))
def test_a_mutated_message_is_a_violation_or_a_message(at: int, removed: int, put: bytes) -> None:
    body = wire.encode(wire.Envelope(request_id="id", request=wire.LeaseSamples(epoch=Epoch(1), count=2)))
    try:
        decoded = wire.decode(wire.Envelope, body[:at] + put + body[at + removed :])
    except ProtocolViolation:
        return
    assert isinstance(decoded.request, REQUESTS)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "truncated"),
        (b"[]", "object"),
        (b'{"request_id":"x"}', "request"),
        (b'{"request_id":"x","request":{"type":"Nonsense"}}', "Nonsense"),
        (b'{"request_id":"x","request":{"type":"UploadDone"}}', "epoch"),
        (b'{"request_id":"x","request":{"type":"UploadDone","epoch":"3"}}', r"\$\.request\.epoch"),
        (b'{"request_id":"x","request":{"type":"UploadDone","epoch":3.5}}', r"\$\.request\.epoch"),
        (b'{"request_id":"x","request":{"type":"UploadDone","epoch":3,"more":1}}', "more"),
        (b'{"request_id":"x","request":{"type":"UploadDone","epoch":NaN}}', "invalid"),
        (b'{"request_id":"\xff","request":{"type":"UploadDone","epoch":3}}', "utf-8"),
        (b"[" * 100_000, "decode"),
        (b'{"request_id":"%s","request":{"type":"UploadDone","epoch":3}}' % (b"x" * 65), "length <= 64.*request_id"),
        (b'{"request_id":"x","request":{"type":"Leave","num_open_samples":0,"session":"%s"}}' % (b"x" * 65), "session"),
    ],
)
def test_a_bad_message_says_what_and_where(body: bytes, words: str) -> None:
    with pytest.raises(ProtocolViolation, match=rf"(?i){words}"):
        wire.decode(wire.Envelope, body)


def test_a_deeply_nested_value_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="decode"):
        wire.decode(dict, b'{"a":' * 50_000)


@pytest.mark.parametrize("number", [1 << 64, -(1 << 63) - 1, 1 << 300])
def test_an_integer_of_more_than_64_bits_is_refused(number: int) -> None:
    """One in a commitment once ended the orchestrator at the next seal, and at every start after it: its state is msgpack."""
    request = wire.PostReceipts(
        epoch=Epoch(0),
        num_before=0,
        receipts=(
            Receipt(
                run_id="r",
                epoch=Epoch(0),
                sample=SampleId(0),
                branch=0,
                stage=StageIndex(0),
                direction=Direction.STEP,
                params_version=number,
            ),
        ),
        head=Digest(""),
    )
    body = wire.encode(wire.Envelope(request_id="id", request=request))
    with pytest.raises(ProtocolViolation, match="more than 64 bits"):
        wire.decode(wire.Envelope, body)


def test_a_message_over_the_limit_is_refused_before_it_is_read() -> None:
    body = wire.encode(wire.Done())
    with pytest.raises(ProtocolViolation, match=f"{len(body)} bytes, limit {len(body) - 1}"):
        wire.decode(wire.Done, body, limit_bytes=len(body) - 1)
    assert wire.decode(wire.Done, body, limit_bytes=len(body)) == wire.Done()


def test_a_request_is_no_response() -> None:
    with pytest.raises(ProtocolViolation):
        wire.decode(wire.Done, wire.encode(wire.GetMergePlan(epoch=Epoch(1))))


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        wire.Done().type = "x"  # type: ignore[attr-defined]


def test_a_sample_is_named_by_epoch_number_and_branch() -> None:
    assert wire.sample_key(Epoch(2), 5, 1) == (2, 5, 1)  # type: ignore[arg-type]  # a plain number will do here
