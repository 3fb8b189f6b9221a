"""What a miner or a validator may do with its machine, in the terms that pay depends on (trust.md 7).

`detection` is the chance that the audit of one epoch in which it cheated finds it. Those of the table are what
`scripts/study_attacks.py` measured on the real code paths (docs/attacks.md), so in segments of four micro-batches. What shows in
an epoch's first or last segment alone depends on how many segments there are: the table has the chance for the most.
"""

import enum
from typing import Annotated

from msgspec import Meta

from subnet.types import Record

Share = Annotated[float, Meta(ge=0, le=1)]


class Strategy(Record, frozen=True):
    """One way to mine, over what the machine could do honestly."""

    name: str
    claimed: Annotated[float, Meta(ge=0)] = 1.0
    """Volume it has credited in an epoch in which it cheats."""
    cost: Annotated[float, Meta(ge=0)] = 1.0
    """Compute it spends in an epoch in which it cheats."""
    cheating: Share = 0.0
    """Fraction of its epochs in which it cheats."""
    detection: Share = 0.0
    absence: Share = 0.0
    """Chance that it does not answer a challenge."""
    rejection: Share = 0.0
    """Chance that a gate or referee of the merge refuses what it delivered in an epoch in which it cheats."""
    exposure: Share = 0.0
    """Chance that it is convicted in an epoch in which it cheats without an audit of its own: a shard was recomputed."""
    num_hotkeys: Annotated[int, Meta(ge=1)] = 1
    is_returning: bool = False
    """Takes a new hotkey when one is banned."""
    epochs_present: Annotated[int, Meta(ge=0)] = 0
    """With `epochs_away`, it comes and goes; 0 stays for ever."""
    epochs_away: Annotated[int, Meta(ge=0)] = 0

    def is_present(self, epoch: int) -> bool:
        """Whether it works in this epoch."""
        cycle = self.epochs_present + self.epochs_away
        return self.epochs_present == 0 or epoch % cycle < self.epochs_present


class ValidatorKind(enum.StrEnum):
    """How a validator behaves."""

    HONEST = "honest"
    PASSING = "passing"
    """Passes whatever it is to audit."""
    FAILING = "failing"
    """Fails whatever it is to audit."""
    COPIER = "copier"
    """Audits nothing, posts the weights that others posted an epoch ago."""


HONEST = Strategy(name="honest")

ENDS = 0.26
"""Chance that an audit of one segment falls on the first, or on the last, of 32 (preset mainnet); fewer segments give more."""

ATTACKS = (
    Strategy(name="identity stage", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0),
    Strategy(name="stale params", cost=0.67, cheating=1.0, detection=0.75),
    Strategy(name="skipped layer", claimed=1.5, cost=0.6, cheating=1.0, detection=1.0),
    Strategy(name="truncated tokens", claimed=1.5, cost=0.5, cheating=1.0, detection=1.0),
    Strategy(name="scaled output", cheating=1.0, detection=1.0),
    Strategy(name="replayed activation", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0),
    Strategy(name="half the steps", cost=0.98, cheating=1.0, detection=1.0),
    Strategy(name="never trains", cost=0.96, cheating=1.0, detection=1.0),
    Strategy(name="a fifth of the samples", claimed=1.15, cost=0.8, cheating=1.0, detection=0.75),
    Strategy(name="one epoch in five", claimed=1.5, cost=0.02, cheating=0.2, detection=1.0),
    Strategy(name="poison along the gradient", cost=1.1, cheating=1.0, detection=1.0),
    Strategy(name="false loss", cheating=1.0, detection=1.0),
    Strategy(name="framing", cheating=1.0, detection=0.55),
    Strategy(name="other start", cheating=1.0, detection=ENDS),
    Strategy(name="poisoned upload", cheating=1.0, detection=ENDS),
    Strategy(name="zero upload", cheating=1.0, detection=ENDS),
    Strategy(name="a little is enough", cheating=1.0, detection=ENDS),
    Strategy(name="copied update", cheating=1.0, rejection=1.0),
    Strategy(name="corrupt reducer", cheating=1.0, rejection=1.0),
    Strategy(name="missing reducer", cost=0.99, cheating=1.0, rejection=1.0),
    Strategy(name="contradicts its commitment", cheating=1.0, rejection=1.0),
    Strategy(name="colluding reducers", cheating=1.0, exposure=0.08),
    Strategy(name="never answers challenges", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0, absence=1.0),
    Strategy(name="forged evidence", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0),
    Strategy(name="new hotkey after each ban", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0, is_returning=True),
    Strategy(name="many hotkeys", claimed=1.5, cost=0.02, cheating=1.0, detection=1.0, num_hotkeys=4),
    Strategy(
        name="joins, leaves, rejoins",
        claimed=1.5,
        cost=0.02,
        cheating=1.0,
        detection=1.0,
        epochs_present=5,
        epochs_away=25,
    ),
)
"""The attacks of trust.md 7 that work through one miner's pay; `colluding reducers` is one of a pair with one shard between
them."""
