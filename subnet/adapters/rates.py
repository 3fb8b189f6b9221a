"""Rates: token buckets for requests and their bytes, and a least speed for bulk transfers (trust.md 6)."""

import time
from collections import OrderedDict

MIN_BYTES_PER_S = 64 * 1024
GRACE_S = 10.0


def transfer_limit_s(size_bytes: int, *, min_bytes_per_s: float = MIN_BYTES_PER_S, grace_s: float = GRACE_S) -> float:
    """How long a transfer of `size_bytes` may take at the least speed."""
    return grace_s + size_bytes / min_bytes_per_s


class RateLimiter:
    """A token bucket for each key, of the keys used last; memory is bounded by `max_keys`."""

    def __init__(self, per_s: float, *, burst: float, max_keys: int = 16384) -> None:
        self._per_s = per_s
        self._burst = max(1.0, burst)
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Whether `key` may spend `cost` more now: a request, or so many bytes."""
        now = time.monotonic()
        tokens, then = self._buckets.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._per_s)
        is_allowed = tokens >= cost
        self._buckets[key] = (tokens - cost if is_allowed else tokens, now)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return is_allowed
