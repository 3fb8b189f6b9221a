"""Text of a stream of tokens: whole characters, and nothing of a stop text."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from subnet.inference.text import TextStream
from subnet.model.export import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def pieces(ids: Sequence[int], stop: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    stream = TextStream(decode, stop)
    found = [stream.push(token) for token in ids]
    return [*found, stream.end()], stream.is_stopped


@given(st.text())
def test_pieces_are_the_text(text: str) -> None:
    found, _ = pieces(list(text.encode()))
    assert "".join(found) == text


@example([128, 128, 128, 194, 128])
@example([240, 244, 130, 130, 244, 128])
@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_no_text_come_out_as_they_decode(ids: list[int]) -> None:
    assert "".join(pieces(ids)[0]) == decode(ids)


def test_a_character_is_shown_whole() -> None:
    found, _ = pieces(list("aé世!".encode()))
    assert found == ["a", "", "é", "", "", "世", "!", ""]


@given(st.text(alphabet="ab#"), st.lists(st.text(alphabet="ab#", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop(text: str, stop: list[str]) -> None:
    found, is_stopped = pieces(list(text.encode()), tuple(stop))
    ends = [at for each in stop if (at := text.find(each)) >= 0]
    whole = "".join(found)
    assert is_stopped == bool(ends)
    if not ends:
        assert whole == text
    else:
        # a stop text that is complete first ends the text, though a longer one may have begun before it
        first = min(text.find(each) + len(each) for each in stop if each in text)
        assert text.startswith(whole)
        assert len(whole) <= first
        assert not any(each in whole for each in stop)


@pytest.mark.parametrize("stop", ["\n\n", "世界"])
def test_no_part_of_a_stop_text_is_shown(stop: str) -> None:
    found, is_stopped = pieces(list(f"one{stop}two".encode()), (stop,))
    assert ("".join(found), is_stopped) == ("one", True)
