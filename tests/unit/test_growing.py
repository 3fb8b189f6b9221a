"""A choice as it grows: why it ended, what is shown of it, and where its tokens stand."""

from collections.abc import Sequence

import pytest

from neurons.serving.growing import GrowingChoice, Unfinished
from subnet.inference.jobs import End, Ended, Token
from subnet.inference.sampling import Choice


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def grown(text: bytes, *, stop: tuple[str, ...] = (), end: End = End.LENGTH) -> tuple[GrowingChoice, list[str]]:
    choice = GrowingChoice(0, decode, stop, wants_logprobs=True)
    pieces = [choice.take(Token(1, Choice(token=token, logprob=-1.0))) for token in text]
    return choice, [*pieces, choice.take(Ended(1, end))]


def test_an_answer_of_full_length() -> None:
    choice, pieces = grown(b"war")
    assert (choice.finish_reason, "".join(pieces), len(choice.choices)) == ("length", "war", 3)


def test_a_stop_text_that_is_seen_with_the_last_token_is_why_it_ended() -> None:
    """The last byte may begin a character, so the text before it was held back until nothing more could come."""
    choice, pieces = grown("peace.é".encode()[:-1], stop=(".",))
    assert ("".join(pieces), choice.finish_reason) == ("peace", "stop")


def test_what_comes_after_a_stop_text_says_nothing() -> None:
    choice, pieces = grown(b"one. two", stop=(".",))
    assert ("".join(pieces), choice.finish_reason) == ("one", "stop")
    assert pieces[4:] == [""] * 5
    assert len(choice.choices) == 4


def test_offsets_count_characters_from_the_beginning_of_the_answer_also_in_pieces() -> None:
    choice = GrowingChoice(0, decode, wants_logprobs=True)
    offsets: list[int] = []
    for token in "aé\u2014b".encode():
        choice.take(Token(1, Choice(token=token, logprob=-1.0)))
        fresh = choice.fresh_logprobs()
        assert fresh is not None
        offsets += fresh["text_offset"]
    assert offsets == [0, 1, 1, 2, 2, 2, 3]


def test_nobody_who_did_not_ask_is_told_probabilities() -> None:
    choice = GrowingChoice(0, decode)
    choice.take(Token(1, Choice(token=97, logprob=-1.0)))
    assert choice.fresh_logprobs() is None


@pytest.mark.parametrize("end", [End.TIMEOUT, End.UNAVAILABLE])
def test_an_end_that_is_no_answer_is_raised(end: End) -> None:
    with pytest.raises(Unfinished) as unfinished:
        grown(b"war", end=end)
    assert unfinished.value.ended.end is end
