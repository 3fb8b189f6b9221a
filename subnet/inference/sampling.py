"""From logits to a token: temperature, top-k, top-p, and a draw that repeats.

The draw is named by the request's seed and the token's position, so a sequence that is rebuilt on another host, or computed in
other company, goes on with the same tokens.

Legend: V vocabulary.
"""

from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from subnet.draws import uniform
from subnet.types import Record

MAX_LOGPROBS = 5


class Sampling(Record, frozen=True):
    """How a request wants its tokens chosen. Temperature 0 takes the likeliest."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Likeliest tokens to choose from; 0: all."""
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    num_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = 0
    """Likeliest tokens to report beside the chosen one."""


class Choice(Record, frozen=True):
    """A token, its log probability (before temperature), and the likeliest others where they were asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> Choice:
    """The token at `position` of its sequence."""
    logprobs_V = logits_V.to(torch.float64).log_softmax(-1)
    token = int(logits_V.argmax()) if sampling.temperature == 0 else _drawn(logits_V, sampling, position)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.num_logprobs:
        values, ids = logprobs_V.topk(min(sampling.num_logprobs, len(logprobs_V)))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Choice(token=token, logprob=float(logprobs_V[token]), top=top)


def _drawn(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """By inversion over the tokens from likeliest down, equal ones in order of their ids."""
    values, ids = (logits_V.to(torch.float64) / sampling.temperature).sort(descending=True, stable=True)
    shares = values.softmax(-1)
    if sampling.top_k:
        shares, ids = shares[: sampling.top_k], ids[: sampling.top_k]
    before = shares.cumsum(-1) - shares
    shares = shares * (before < sampling.top_p)  # the first is always kept
    reached = shares.cumsum(-1)
    point = uniform(sampling.seed, "token", position) * float(reached[-1])
    index = int((reached <= point).sum())
    return int(ids[min(index, int(shares.count_nonzero()) - 1)])
