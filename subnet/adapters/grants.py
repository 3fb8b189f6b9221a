"""Signed URLs: the right to put or get exactly one object until a moment (trust.md 6).

The signature binds method, key, expiry, size and digest, so a grant neither moves to another key nor takes other bytes.
"""

import hashlib
import hmac
from typing import Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from subnet.adapters.system import check_name
from subnet.errors import Refused
from subnet.types import NO_DIGEST, BlobRef, Digest, Record

Method = Literal["GET", "PUT"]


class Grant(Record, frozen=True):
    """What one signed URL allows; `size_bytes` and `digest` belong to PUT, a GET gives whatever lies under the key."""

    method: Method
    key: str
    expires_at_ms: int
    size_bytes: int = 0
    digest: Digest = NO_DIGEST

    @classmethod
    def upload(cls, ref: BlobRef, expires_at_s: float) -> "Grant":
        """The right to put exactly `ref`."""
        expires_at_ms = int(expires_at_s * 1000)
        return cls(method="PUT", key=ref.key, expires_at_ms=expires_at_ms, size_bytes=ref.size_bytes, digest=ref.digest)

    @classmethod
    def download(cls, key: str, expires_at_s: float) -> "Grant":
        """The right to get what lies under `key`."""
        return cls(method="GET", key=key, expires_at_ms=int(expires_at_s * 1000))


def _signature(secret: bytes, grant: Grant) -> str:
    lines = ("strata/blob/1", grant.method, grant.key, str(grant.expires_at_ms), str(grant.size_bytes), grant.digest)
    return hmac.new(secret, "\n".join(lines).encode(), hashlib.sha256).hexdigest()


def grant_url(base_url: str, secret: bytes, grant: Grant) -> str:
    """`base_url`/key with the grant in its query."""
    check_name(grant.key)
    fields = {"method": grant.method, "expires": str(grant.expires_at_ms)}
    if grant.method == "PUT":
        fields |= {"size": str(grant.size_bytes), "digest": grant.digest}
    return f"{base_url}/{grant.key}?{urlencode(fields | {'signature': _signature(secret, grant)})}"


def check_grant(key: str, query: str, *, method: str, secret: bytes, now: float) -> Grant:
    """The grant that `query` carries for `method` on `key`. Raises Refused: forged, for something else, or expired."""
    fields = dict(parse_qsl(query, max_num_fields=8)) if query.count("&") < 8 else {}
    try:
        grant = Grant(
            method="PUT" if method == "PUT" else "GET",
            key=check_name(key),
            expires_at_ms=int(fields.get("expires", "")),
            size_bytes=int(fields.get("size", "0")),
            digest=Digest(fields.get("digest", "")),
        )
    except ValueError as error:
        raise Refused(
            "bad_grant", "this URL is not one that was granted; ask the orchestrator for a new one"
        ) from error
    expected = _signature(secret, grant)
    is_genuine = hmac.compare_digest(expected.encode(), fields.get("signature", "").encode())
    if not is_genuine or fields.get("method") != method:
        raise Refused(
            "bad_grant", f"this URL was not granted for {method} of this object; ask the orchestrator for one"
        )
    if now * 1000 >= grant.expires_at_ms:
        raise Refused("grant_expired", "this URL has expired; ask the orchestrator for a new one")
    return grant


def split_url(url: str, base_url: str) -> tuple[str, str]:
    """Key and query of a URL under `base_url`. Raises Refused when it lies elsewhere."""
    if not url.startswith(base_url + "/"):
        raise Refused("bad_grant", f"{url[:80]} is not a URL of this store")
    parts = urlsplit(url[len(base_url) + 1 :])
    return parts.path, parts.query


def check_upload(grant: Grant, *, size_bytes: int, digest: Digest) -> None:
    """Raise Refused unless these are exactly the granted bytes."""
    if size_bytes != grant.size_bytes:
        raise Refused("wrong_size", f"{size_bytes} bytes for {grant.key}, granted were {grant.size_bytes}")
    if digest != grant.digest:
        raise Refused("wrong_digest", f"bytes for {grant.key} have another digest than was granted")


def check_range(start: int, size_bytes: int | None) -> None:
    """Raise ValueError for what is no range."""
    if start < 0 or (size_bytes is not None and size_bytes < 1):
        raise ValueError(f"not a range: start {start}, size {size_bytes}")
