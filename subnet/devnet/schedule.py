"""When a subnet's epochs run: stored state, not a modulo of the block number (chain.md 2)."""

from subnet.devnet.context import Storage

_MILLI = 1_000


def next_epoch_block(storage: Storage, netuid: int) -> int | None:
    """The block at which the subnet's next epoch runs; None with tempo 0."""
    tempo = storage.get("Tempo", netuid)
    if tempo == 0:
        return None
    scheduled = int(storage.get("LastEpochBlock", netuid) + tempo)
    triggered = storage.get("PendingEpochAt", netuid)
    return min(scheduled, triggered) if triggered else scheduled


def activity_cutoff(storage: Storage, netuid: int) -> int:
    """Blocks without weights after which a validator no longer counts."""
    by_tempo = storage.get("ActivityCutoffFactorMilli", netuid) * storage.get("Tempo", netuid) // _MILLI
    return max(int(storage.get("MinActivityCutoff")), int(by_tempo))
