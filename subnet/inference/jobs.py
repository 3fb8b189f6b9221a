"""What a gateway's batcher is given and gives back: limits, jobs, and the effects it decides on."""

import enum
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from subnet.inference.messages import Drop, Step
from subnet.inference.sampling import Choice, Sampling
from subnet.types import Endpoint, Record

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class BatchLimits(Record, frozen=True):
    """What a gateway takes on."""

    max_waiting: Count = 256
    """Sequences that may wait for a place; more are turned away."""
    max_running: Count = 64
    """Sequences under way at once."""
    max_rows: Count = 256
    """Tokens in one step; longer prompts are read in several."""
    max_attempts: Count = 3
    """Times a sequence is sent again after a host was lost."""
    step_s: Seconds = 60.0
    """A step without an answer for this long is given up."""
    request_s: Seconds = 600.0
    """From the request to its last token."""
    failover_s: Seconds = 10.0
    """How long a sequence whose stage has no host waits for one."""


class End(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice of one request. `client` is what waiting is fair between."""

    key: int
    client: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    num_at_once: int = 1
    """Tokens that one step makes; more than one only of stages that denoise."""


@dataclass(frozen=True, slots=True)
class SendStep:
    """To the first host of a route."""

    host: Endpoint
    step: Step


@dataclass(frozen=True, slots=True)
class SendDrop:
    """To one host of a route."""

    host: Endpoint
    drop: Drop


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of a job."""

    key: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's last word."""

    key: int
    end: End
    detail: str = ""


Effect = SendStep | SendDrop | Token | Ended
