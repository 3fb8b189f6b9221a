"""A run's public objects over HTTP, no key needed (ports.PublicRecord)."""

import aiohttp

from subnet.adapters import routes
from subnet.adapters.blobs import HttpBlobs


class HttpPublic:
    """The orchestrator's public routes."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._blobs = HttpBlobs(session)
        self._base = url.rstrip("/")

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        """A public object. Raises NotFound, TransientFailure, ProtocolViolation (too long)."""
        return await self._blobs.get(f"{self._base}{routes.PUBLIC}{name}", limit_bytes=limit_bytes)
