"""What a pallet may do while a block is made: read and write storage by name, emit events, refuse."""

from typing import Any

from subnet.devnet.codec import Codec
from subnet.devnet.state import State, View


class DispatchFailure(Exception):
    """A call was included in a block and refused by the runtime; its writes are undone, its fee is kept."""

    def __init__(self, name: str, *, pallet: str = "SubtensorModule") -> None:
        super().__init__(f"{pallet}.{name}")
        self.pallet = pallet
        self.name = name

    @classmethod
    def bad_origin(cls) -> "DispatchFailure":
        """The caller may not make this call at all; no pallet's error."""
        return cls("BadOrigin", pallet="")


class Storage:
    """Typed reads of one state."""

    def __init__(self, codec: Codec, view: View) -> None:
        self.codec = codec
        self._view = view

    def read(self, pallet: str, item: str, *params: int | str) -> Any:
        """A storage value; absence reads as the item's default, or None for an optional item."""
        entry = self.codec.item(pallet, item)
        raw = self._view.get(self.codec.key(pallet, item, *params))
        if raw is None:
            raw = entry.default
        return None if raw is None else self.codec.decode(entry.value_type, raw)

    def get(self, item: str, *params: int | str) -> Any:
        """A value of the SubtensorModule pallet."""
        return self.read("SubtensorModule", item, *params)

    def column(self, item: str, netuid: int) -> list[Any]:
        """A per-neuron vector of a subnet."""
        return list(self.get(item, netuid))

    def entries(self, pallet: str, item: str, *params: int | str) -> list[tuple[list[Any], Any]]:
        """(map parameters, value) of every entry below `params`, in key order."""
        entry = self.codec.item(pallet, item)
        found = []
        for key in self._view.keys(self.codec.key(pallet, item, *params)):
            raw = self._view.get(key)
            if raw is not None:
                found.append((self.codec.key_params(pallet, item, key), self.codec.decode(entry.value_type, raw)))
        return found

    def netuids(self) -> list[int]:
        """Every subnet there is, root included."""
        return sorted(params[0] for params, is_added in self.entries("SubtensorModule", "NetworksAdded") if is_added)


class Context(Storage):
    """The block being made."""

    def __init__(self, codec: Codec, state: State, *, block: int, now_ms: int) -> None:
        super().__init__(codec, state)
        self.state = state
        self.block = block
        self.now_ms = now_ms
        self.events: list[dict[str, Any]] = []
        self.extrinsic: int | None = None

    def write(self, pallet: str, item: str, value: Any, *params: int | str) -> None:
        """Set a storage value; None deletes it. Fields that `value` leaves out are zero."""
        entry = self.codec.item(pallet, item)
        raw = None if value is None else self.codec.encode_filled(entry.value_type, value)
        self.state.put(self.codec.key(pallet, item, *params), raw)

    def put(self, item: str, value: Any, *params: int | str) -> None:
        """Set a value of the SubtensorModule pallet; None deletes it."""
        self.write("SubtensorModule", item, value, *params)

    def put_at(self, item: str, netuid: int, uid: int, value: Any) -> None:
        """Set one neuron's entry of a per-neuron vector."""
        column = self.column(item, netuid)
        column[uid] = value
        self.put(item, column, netuid)

    def emit(self, pallet: str, event: str, value: Any) -> None:
        """Record an event of the extrinsic being applied, or of the block itself."""
        phase = "Initialization" if self.extrinsic is None else {"ApplyExtrinsic": self.extrinsic}
        body = event if value is None else {event: value}
        self.events.append({"phase": phase, "event": {pallet: body}, "topics": []})

    def require(self, holds: bool, error: str, *, pallet: str = "SubtensorModule") -> None:
        """Refuse the call with the runtime's error unless `holds`."""
        if not holds:
            raise DispatchFailure(error, pallet=pallet)
