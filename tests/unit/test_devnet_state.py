"""Nested transactions, the readable past, and undoing blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.devnet.state import State

A, B = b"a" * 40, b"b" * 40


def test_a_rolled_back_transaction_leaves_no_trace() -> None:
    state = State(kept_blocks=4)
    state.put(A, b"1")
    state.begin()
    state.put(A, b"2")
    state.put(B, b"3")
    state.begin()
    state.put(A, None)
    state.commit()
    state.rollback()
    assert state.get(A) == b"1" and state.get(B) is None
    assert state.seal() == {A: b"1"}


def test_the_past_is_read_as_it_was() -> None:
    state = State(kept_blocks=4)
    state.put(A, b"1")
    state.seal()
    state.put(A, None)
    state.put(B, b"2")
    state.seal()
    past = state.at(1)
    assert past.get(A) == b"1" and past.get(B) is None
    assert past.keys(b"") == [A] and state.keys(b"") == [B]
    state.undo()
    assert state.get(A) == b"1" and state.keys(b"b") == []
    with pytest.raises(IndexError):
        state.undo()
        state.undo()


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([A, B, b"c"]), st.sampled_from([None, b"1", b"2"])), max_size=4), max_size=12
    )
)
@settings(max_examples=60, deadline=None)
def test_any_block_can_be_read_back_and_undone(blocks: list[list[tuple[bytes, bytes | None]]]) -> None:
    state = State(kept_blocks=32)
    history = []
    for writes in blocks:
        for key, value in writes:
            state.put(key, value)
        state.seal()
        history.append({key: state.get(key) for key in (A, B, b"c")})
    for depth, expected in enumerate(reversed(history)):
        assert {key: state.at(depth).get(key) for key in expected} == expected
    for expected in reversed(history):
        assert {key: state.get(key) for key in expected} == expected
        state.undo()
