"""Key-value state with nested transactions and a bounded past.

Only changes are kept: each block remembers what its writes replaced, so an old state is read by looking
through the blocks above it, and a block is undone by putting the replaced values back.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Protocol

Changes = dict[bytes, bytes | None]
"""Key -> value; None stands for absence."""

_PREFIX_BYTES = 32
"""Length of the part of a storage key that names pallet and item."""


class View(Protocol):
    """State as of one block."""

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        ...

    def keys(self, prefix: bytes) -> list[bytes]:
        """Every key that starts with `prefix`, in order."""
        ...


class State:
    """The newest state; a View of it, and of the last `kept_blocks` blocks."""

    def __init__(self, *, kept_blocks: int) -> None:
        self._values: dict[bytes, bytes] = {}
        self._by_prefix: dict[bytes, set[bytes]] = {}
        self._replaced: list[Changes] = [{}]
        self._past: deque[Changes] = deque(maxlen=kept_blocks)

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        return self._values.get(key)

    def keys(self, prefix: bytes) -> list[bytes]:
        """Every key that starts with `prefix`, in order."""
        return sorted(self._candidates(prefix))

    def put(self, key: bytes, value: bytes | None) -> None:
        """Set or (None) delete a value inside the innermost open transaction."""
        old = self._values.get(key)
        if old == value:
            return
        self._replaced[-1].setdefault(key, old)
        self._write(key, value)

    def begin(self) -> None:
        """Open a transaction inside the present one."""
        self._replaced.append({})

    def commit(self) -> None:
        """Keep what the innermost transaction wrote."""
        inner = self._replaced.pop()
        for key, old in inner.items():
            self._replaced[-1].setdefault(key, old)

    def rollback(self) -> None:
        """Undo what the innermost transaction wrote."""
        self._restore(self._replaced.pop())

    def seal(self) -> Changes:
        """End the block: returns what it wrote, and keeps what that replaced."""
        replaced = self._replaced[0]
        self._past.append(replaced)
        self._replaced = [{}]
        return {key: self._values.get(key) for key in replaced}

    def undo(self) -> None:
        """Take the newest sealed block back. IndexError when its past is not kept."""
        self._restore(self._past.pop())

    @property
    def num_kept(self) -> int:
        """How many sealed blocks can be read or undone."""
        return len(self._past)

    def at(self, depth: int) -> View:
        """The state `depth` blocks below the newest sealed one."""
        if not depth:
            return self
        later = [self._past[-above] for above in range(depth, 0, -1)]
        return _Old(self, later, self._replaced[0])

    def everything(self) -> Mapping[bytes, bytes]:
        """All of it, for a snapshot."""
        return self._values

    def _candidates(self, prefix: bytes) -> Iterator[bytes]:
        head = prefix[:_PREFIX_BYTES]
        if len(prefix) >= _PREFIX_BYTES:
            groups = [self._by_prefix.get(head, set())]
        else:
            groups = [keys for start, keys in self._by_prefix.items() if start.startswith(head)]
        return (key for keys in groups for key in keys if key.startswith(prefix))

    def _write(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            if self._values.pop(key, None) is not None:
                self._by_prefix[key[:_PREFIX_BYTES]].discard(key)
            return
        if key not in self._values:
            self._by_prefix.setdefault(key[:_PREFIX_BYTES], set()).add(key)
        self._values[key] = value

    def _restore(self, replaced: Changes) -> None:
        for key, old in replaced.items():
            self._write(key, old)


class _Old:
    """The state some blocks ago, read through what later blocks replaced."""

    def __init__(self, state: State, later: list[Changes], unsealed: Changes) -> None:
        self._state = state
        self._later = [*later, unsealed]

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        for replaced in self._later:
            if key in replaced:
                return replaced[key]
        return self._state.get(key)

    def keys(self, prefix: bytes) -> list[bytes]:
        """Every key that starts with `prefix`, in order."""
        candidates = set(self._state.keys(prefix))
        for replaced in self._later:
            candidates.update(key for key in replaced if key.startswith(prefix))
        return sorted(key for key in candidates if self.get(key) is not None)
