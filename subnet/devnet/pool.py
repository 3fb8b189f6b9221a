"""The transaction pool: what waits for a block, ordered by account and nonce."""

from collections.abc import Callable

from subnet.devnet.extrinsics import Extrinsic, PoolError, invalid

_MAX_WAITING = 8_192


class Pool:
    """Extrinsics that were taken and not yet included."""

    def __init__(self) -> None:
        self._by_slot: dict[tuple[str, int], Extrinsic] = {}
        self._ends_at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def add(self, extrinsic: Extrinsic, *, account_nonce: int, block: int) -> None:
        """Take an extrinsic, whose era is counted from `block`. Raises PoolError as substrate does."""
        if extrinsic.nonce < account_nonce:
            raise invalid("Transaction is outdated")
        if len(self._by_slot) >= _MAX_WAITING:
            raise PoolError(
                1016, "Immediately Dropped", "The transaction could not enter the pool because of the limit"
            )
        slot = (extrinsic.signer, extrinsic.nonce)
        waiting = self._by_slot.get(slot)
        if waiting is None or extrinsic.tip > waiting.tip:
            self._by_slot[slot] = extrinsic
            if extrinsic.era.period:
                self._ends_at[extrinsic.digest] = extrinsic.era.birth(block) + extrinsic.era.period
            return
        if waiting.digest == extrinsic.digest:
            raise PoolError(1013, "Transaction Already Imported", None)
        reason = "The transaction has too low priority to replace another transaction already in the pool."
        raise PoolError(1014, f"Priority is too low: ({waiting.tip} vs {extrinsic.tip})", reason)

    def next_nonce(self, who: str, account_nonce: int) -> int:
        """The nonce that a new extrinsic of this account should have."""
        nonce = account_nonce
        while (who, nonce) in self._by_slot:
            nonce += 1
        return nonce

    def take_ready(self, account_nonce: Callable[[str], int]) -> list[Extrinsic]:
        """Remove and return what can be included now: each account's extrinsics from its nonce on, without gaps."""
        ready = []
        for who in dict.fromkeys(signer for signer, _ in self._by_slot):
            nonce = account_nonce(who)
            while (extrinsic := self._by_slot.pop((who, nonce), None)) is not None:
                self._ends_at.pop(extrinsic.digest, None)
                ready.append(extrinsic)
                nonce += 1
        return ready

    def drop_stale(self, account_nonce: Callable[[str], int], *, block: int) -> list[Extrinsic]:
        """Remove and return what can never be included any more: outdated nonces, ended eras."""
        stale = [
            extrinsic
            for (who, nonce), extrinsic in self._by_slot.items()
            if nonce < account_nonce(who) or block >= self._ends_at.get(extrinsic.digest, block + 1)
        ]
        for extrinsic in stale:
            self._ends_at.pop(extrinsic.digest, None)
            del self._by_slot[(extrinsic.signer, extrinsic.nonce)]
        return stale

    def restore(self, extrinsics: list[Extrinsic]) -> None:
        """Put extrinsics of undone blocks back."""
        for extrinsic in extrinsics:
            self._by_slot.setdefault((extrinsic.signer, extrinsic.nonce), extrinsic)
