"""What `strata doctor` says: one finding for each thing it looked at, with what to do about it."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Role(enum.StrEnum):
    """Whom the findings are for."""

    MINER = "miner"
    VALIDATOR = "validator"
    OWNER = "owner"


class Level(enum.StrEnum):
    """What a finding means for the node."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found; `code` names the case, `remedy` is what to type or do, empty when all is well."""

    code: str
    level: Level
    text: str
    remedy: str = ""


def problems_first(found: Iterable[Finding]) -> list[Finding]:
    """Problems, then warnings, then what is well; otherwise as they came."""
    order = [Level.PROBLEM, Level.WARNING, Level.OK]
    return sorted(found, key=lambda finding: order.index(finding.level))
