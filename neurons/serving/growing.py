"""One choice of a completion as it grows: answers of the gateway in, text to show out. No network here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from neurons.serving.completions import FINISH_REASONS, logprobs_json
from subnet.inference.jobs import Ended, Token
from subnet.inference.sampling import Choice
from subnet.inference.text import TextStream

Decode = Callable[[Sequence[int]], str]


class Unfinished(Exception):
    """A choice ended for a reason that is no answer."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.detail)
        self.ended = ended


@dataclass(slots=True)
class GrowingChoice:
    """`wants_logprobs`: offsets of tokens in the text are kept too."""

    index: int
    decode: Decode
    stop: tuple[str, ...] = ()
    wants_logprobs: bool = False
    finish_reason: str | None = None
    choices: list[Choice] = field(default_factory=list)
    """Tokens that were made, those of a stop text included."""
    _text: TextStream = field(init=False)
    _plain: TextStream = field(init=False)
    """The same without stop texts, for the offsets."""
    _offsets: list[int] = field(default_factory=list)
    _num_chars: int = 0
    _num_shown: int = 0
    """Tokens whose log probabilities have been given out."""

    def __post_init__(self) -> None:
        self._text, self._plain = TextStream(self.decode, self.stop), TextStream(self.decode)

    def take(self, answer: Token | Ended) -> str:
        """Text to show. Raises Unfinished."""
        if self.finish_reason is not None:
            return ""
        if isinstance(answer, Ended):
            if answer.end not in FINISH_REASONS:
                raise Unfinished(answer)
            text = self._text.end()
            self.finish_reason = "stop" if self._text.is_stopped else FINISH_REASONS[answer.end]
            return text
        self.choices.append(answer.choice)
        if self.wants_logprobs:
            self._offsets.append(self._num_chars)
            self._num_chars += len(self._plain.push(answer.choice.token))
        text = self._text.push(answer.choice.token)
        if self._text.is_stopped:
            self.finish_reason = "stop"
        return text

    def fresh_logprobs(self) -> dict[str, Any] | None:
        """Of the tokens that have not been given out; None where nobody asked."""
        if not self.wants_logprobs:
            return None
        fresh = slice(self._num_shown, len(self.choices))
        self._num_shown = fresh.stop
        return logprobs_json(self.choices[fresh], self._offsets[fresh], self.decode)
