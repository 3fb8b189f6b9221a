"""What the record proves about the limits that audits were judged by; for `strata audit` (trust.md 2)."""

import msgspec

from neurons.checks import Finding, History
from subnet.config import RunConfig
from subnet.orchestration.calibration import limit_over
from subnet.orchestration.ledger import Calibrated, Challenged
from subnet.types import Hotkey


def check_limits(history: History) -> Finding:
    """The limit of every challenge is the one that the noise on record came to at that moment."""
    name = "limits of audits follow from the noise that validators published"
    created = history.record.accounts.created
    if created is None:
        return Finding(name=name, holds=False, detail="the record does not begin with the run's creation")
    audit, noise, count = msgspec.json.decode(created.config_json, type=RunConfig).audit, dict[Hotkey, float](), 0
    for entry in history.record.entries:
        fact = entry.fact
        if isinstance(fact, Calibrated):
            noise[fact.validator] = fact.noise.distance
        if not isinstance(fact, Challenged) or fact.max_rel_d is None:
            continue
        expected = limit_over(list(noise.values()), otherwise=audit.max_rel_d)
        if fact.max_rel_d != expected:
            detail = (
                f"event {entry.seq}: {fact.hotkey} was judged by {fact.max_rel_d:g}, the record yields {expected:g}"
            )
            return Finding(name=name, holds=False, detail=detail)
        count += 1
    return Finding(name=name, holds=True, detail=f"{count} audits, noise of {len(noise)} validators")
