"""What validators measured of their machines, and the limit on distances that follows (trust.md 2).

The limit is three times the median of the honest noise, so a machine that computes oddly, or a validator that lies about its
own, moves it little; who lies above it would convict the honest and does not audit. Plain median: the record has no stakes.
"""

from statistics import median

from subnet import wire
from subnet.config import REL_D_LIMITS
from subnet.errors import Refused
from subnet.orchestration.events import Wake
from subnet.orchestration.ledger import Calibrated
from subnet.orchestration.state import State, Turn
from subnet.types import Hotkey

NOISE_FACTOR = 3.0


def limit_over(distances: list[float], *, otherwise: float) -> float:
    """The network's limit over the noise of its validators, `otherwise` while nobody has measured."""
    if not distances:
        return otherwise
    least, largest = REL_D_LIMITS
    return min(largest, max(least, NOISE_FACTOR * median(distances)))


def max_rel_d(turn: Turn) -> float:
    """The limit for audits that are drawn now: over everybody on record, for permits are not on it."""
    measured = [noise.distance for noise in turn.state.noise.values()]
    return limit_over(measured, otherwise=turn.config.audit.max_rel_d)


def may_audit(state: State, validator: Hotkey, limit: float) -> bool:
    """Whether honest work passes on its machine, as far as it has said."""
    noise = state.noise.get(validator)
    return noise is None or noise.distance <= limit


def post_noise(turn: Turn, sender: Hotkey, request: wire.PostNoise) -> wire.Response:
    """Record what a validator measured; the newest counts. Raises Refused."""
    state = turn.state
    if sender not in state.auditors:
        raise Refused("permit", "only a permit holder that enlisted publishes its noise")
    if request.noise.distance < 0:
        raise Refused("noise", f"a distance is never negative, got {request.noise.distance}: measure it again")
    if state.noise.get(sender) != request.noise:
        state.noise[sender] = request.noise
        turn.record(Calibrated(validator=sender, noise=request.noise))
        turn.ask(Wake())
    return wire.Done()
