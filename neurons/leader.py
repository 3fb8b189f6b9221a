"""Of the orchestrators of one run one leads: whoever holds the lease in their state store; the others wait (system.md 6).

The lease says who should write, the journal finds out who should not have: a second writer fails at its first append. What
no journal fences asks `may_lead`: the clock alone tells a leader that was paused that it may have lost its lease.
"""

import logging
import socket
from collections.abc import Callable
from pathlib import Path

from subnet.errors import Superseded, TransientFailure
from subnet.ports import Clock, StateStore

LEASE = "orchestrator"
LEASE_S = 12.0
"""A leader that is gone is replaced after at most this long."""
_RENEWALS = 4
"""In one lease; all but one may fail."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("strata.leader")


def holder_name(data_path: Path) -> str:
    """Who holds the lease: a directory on a machine, so that a process that is started again goes on at once.

    Copied machines have one name; what the kernel drew when it started tells them apart.
    """
    return f"{socket.gethostname()}:{data_path} (boot {_BOOT_ID.read_text()[:8]})"


class Leadership:
    """One candidate's view of the lease."""

    def __init__(self, store: StateStore, clock: Clock, *, holder: str, lease_s: float = LEASE_S) -> None:
        self._store = store
        self._clock = clock
        self._holder = holder
        self._lease_s = lease_s
        self._leader = ""
        self._held_until_s = 0.0

    async def take(self, on_wait: Callable[[str], None]) -> None:
        """Wait until this candidate leads; `on_wait` hears who leads meanwhile, each time that changes."""
        told = ""
        while not await self._renew():
            if self._leader != told:
                told = self._leader
                log.info("standing by", extra={"leader": told})
                on_wait(told)
            await self._clock.sleep(self._lease_s / _RENEWALS)

    def may_lead(self) -> bool:
        """Whether the lease cannot have run out yet, by this machine's clock and without asking anybody."""
        return self._clock.now() < self._held_until_s

    async def keep(self) -> None:
        """Renew for ever. Raises Superseded when another leads, TransientFailure when the store was away for a whole lease."""
        while True:
            await self._clock.sleep(self._lease_s / _RENEWALS)
            try:
                holds = await self._renew()
            except TransientFailure:
                if not self.may_lead():
                    raise
                continue
            if not holds:
                raise Superseded(
                    f"{self._leader} leads this run now; started again, this orchestrator stands by for it"
                )

    async def give_up(self) -> None:
        """Let the next candidate lead at once."""
        try:
            await self._store.release_lease(LEASE, self._holder)
        except TransientFailure as error:  # it runs out by itself
            log.warning("lease not released", extra={"reason": str(error)})

    async def _renew(self) -> bool:
        asked_s = self._clock.now()
        self._leader = await self._store.hold_lease(LEASE, self._holder, for_s=self._lease_s)
        if self._leader != self._holder:
            return False
        self._held_until_s = asked_s + self._lease_s
        return True
