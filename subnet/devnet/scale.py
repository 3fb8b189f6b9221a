"""The few SCALE primitives that are read and written by hand: compact integers and byte vectors."""

from subnet.errors import ProtocolViolation


def compact(value: int) -> bytes:
    """A non-negative integer in SCALE's compact form."""
    if value < 1 << 6:
        return bytes([value << 2])
    if value < 1 << 14:
        return (value << 2 | 1).to_bytes(2, "little")
    if value < 1 << 30:
        return (value << 2 | 2).to_bytes(4, "little")
    body = value.to_bytes((value.bit_length() + 7) // 8, "little")
    return bytes([(len(body) - 4) << 2 | 3]) + body


def vector(data: bytes) -> bytes:
    """A byte vector: compact length, then the bytes."""
    return compact(len(data)) + data


class Reader:
    """Reads SCALE bytes from front to back; running off the end is the sender's fault."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def take(self, size_bytes: int) -> bytes:
        """The next `size_bytes` bytes."""
        end = self.position + size_bytes
        if end > len(self._data):
            raise ProtocolViolation(f"{size_bytes} bytes wanted at {self.position}, only {len(self._data)} there")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def integer(self, size_bytes: int) -> int:
        """A little-endian integer of fixed size."""
        return int.from_bytes(self.take(size_bytes), "little")

    def compact(self) -> int:
        """A compact integer."""
        first = self.integer(1)
        mode = first & 3
        if mode == 3:
            return self.integer((first >> 2) + 4)
        size_bytes = (1, 2, 4)[mode]
        rest = self.take(size_bytes - 1)
        return int.from_bytes(bytes([first]) + rest, "little") >> 2

    def vector(self) -> bytes:
        """A byte vector."""
        return self.take(self.compact())

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(len(self._data) - self.position)
