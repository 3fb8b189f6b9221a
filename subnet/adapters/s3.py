"""Any S3-compatible bucket as blob store: obstore for the owner of the keys, presigned URLs for everybody else.

The URL binds method, key, expiry and Content-Length. S3 knows no blake3, so the digest cannot be bound; it stands at the end
of the key, and whoever reads an object checks it.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import quote, urlsplit

import obstore
from msgspec import Meta
from obstore.exceptions import BaseError, NotFoundError
from obstore.store import S3Store

from subnet.adapters.grants import check_range
from subnet.adapters.system import check_name
from subnet.errors import InvalidConfig, NotFound, TransientFailure
from subnet.ports import Clock
from subnet.types import BlobRef, Record

_ALGORITHM = "AWS4-HMAC-SHA256"
_LONGEST_LIFE_S = 7 * 86400
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._/-]*)?")


class Bucket(Record, frozen=True):
    """Where a bucket is and the key to it; stays with the orchestrator."""

    endpoint: str
    """Such as https://s3.eu-central-1.amazonaws.com, without the bucket."""
    name: Annotated[str, Meta(min_length=1)]
    access_key: str
    secret_key: str
    region: str = "us-east-1"
    prefix: str = ""
    """Put before every key, with a slash between."""

    def path_of(self, key: str) -> str:
        """Where `key` lies in the bucket."""
        return f"{self.prefix}/{check_name(key)}" if self.prefix else check_name(key)

    @classmethod
    def from_url(cls, url: str, environment: Mapping[str, str]) -> "Bucket":
        """`s3://BUCKET/PREFIX` with the variables that all S3 tools read: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...

        Raises InvalidConfig naming what is missing.
        """
        parts = urlsplit(url)
        if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc):
            raise InvalidConfig(f"the blob URL must be s3://BUCKET/PREFIX, got {url!r}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            if not environment.get(name):
                raise InvalidConfig(f"set {name}: the bucket {parts.netloc} needs a key, and keys stay out of URLs")
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
        # A slash at the end would be signed as part of every key, which then lies in no bucket.
        endpoint = (environment.get("AWS_ENDPOINT_URL") or f"https://s3.{region}.amazonaws.com").rstrip("/")
        if not _ENDPOINT.fullmatch(endpoint):
            raise InvalidConfig(f"AWS_ENDPOINT_URL must be http(s)://HOST or http(s)://HOST:PORT, got {endpoint!r}")
        return cls(
            endpoint=endpoint,
            name=parts.netloc,
            access_key=environment["AWS_ACCESS_KEY_ID"],
            secret_key=environment["AWS_SECRET_ACCESS_KEY"],
            region=region,
            prefix=parts.path.strip("/"),
        )


class S3BlobStore:
    """A bucket (ports.BlobStore)."""

    def __init__(self, bucket: Bucket, *, clock: Clock) -> None:
        self._bucket = bucket
        self._clock = clock
        self._store = S3Store(
            bucket.name,
            endpoint=bucket.endpoint,
            access_key_id=bucket.access_key,
            secret_access_key=bucket.secret_key,
            region=bucket.region,
            virtual_hosted_style_request=False,
            client_options={"allow_http": bucket.endpoint.startswith("http://"), "timeout": timedelta(seconds=60)},
            retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
        )

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store atomically. Raises TransientFailure."""
        try:
            await obstore.put_async(self._store, self._bucket.path_of(key), data)
        except BaseError as error:
            raise TransientFailure(f"cannot store {key}: {error}") from error

    async def get(self, key: str, *, start: int = 0, size_bytes: int | None = None) -> bytes:
        """Read a range. Raises NotFound, TransientFailure."""
        check_range(start, size_bytes)
        total_bytes = await self.size(key)
        if total_bytes is None or (start and start >= total_bytes):
            raise NotFound(f"no object {key}, or none of its bytes from {start} on")
        end = total_bytes if size_bytes is None else min(total_bytes, start + size_bytes)
        if end == start:
            return b""
        try:
            return bytes(await obstore.get_range_async(self._store, self._bucket.path_of(key), start=start, end=end))
        except (NotFoundError, FileNotFoundError) as error:
            raise NotFound(f"no object {key}") from error
        except BaseError as error:
            raise TransientFailure(f"cannot read {key}: {error}") from error

    async def size(self, key: str) -> int | None:
        """Size in bytes, or None when there is no such object."""
        try:
            return int((await obstore.head_async(self._store, self._bucket.path_of(key)))["size"])
        except (NotFoundError, FileNotFoundError):
            return None
        except BaseError as error:
            raise TransientFailure(f"cannot look up {key}: {error}") from error

    async def delete(self, key: str) -> None:
        """Remove; a key that is not there is no error."""
        try:
            await obstore.delete_async(self._store, self._bucket.path_of(key))
        except (NotFoundError, FileNotFoundError):
            return
        except BaseError as error:
            raise TransientFailure(f"cannot delete {key}: {error}") from error

    async def delete_under(self, prefix: str) -> None:
        """Remove what lies under `prefix`. Raises TransientFailure."""
        try:
            async for listed in obstore.list(self._store, f"{self._bucket.path_of(prefix)}/"):
                await obstore.delete_async(self._store, [found["path"] for found in listed])
        except BaseError as error:
            raise TransientFailure(f"cannot delete what lies under {prefix}: {error}") from error

    def upload_url(self, ref: BlobRef, *, expires_at_s: float) -> str:
        """URL that takes exactly `ref.size_bytes` bytes until it expires."""
        headers = {"content-length": str(ref.size_bytes)}
        return presign(self._bucket, "PUT", ref.key, now=self._clock.now(), expires_at_s=expires_at_s, headers=headers)

    def download_url(self, key: str, *, expires_at_s: float) -> str:
        """URL that gives `key`, with ranges, until it expires."""
        return presign(self._bucket, "GET", key, now=self._clock.now(), expires_at_s=expires_at_s, headers={})


def presign(
    bucket: Bucket, method: str, key: str, *, now: float, expires_at_s: float, headers: Mapping[str, str]
) -> str:
    """URL by Signature Version 4 that is good for `method` on `key` with exactly these (lower-case) headers."""
    endpoint = urlsplit(bucket.endpoint)
    at = datetime.fromtimestamp(now, UTC)
    stamp, day = at.strftime("%Y%m%dT%H%M%SZ"), at.strftime("%Y%m%d")
    scope = f"{day}/{bucket.region}/s3/aws4_request"
    signed = {**headers, "host": endpoint.netloc}
    names = ";".join(sorted(signed))
    fields = {
        "X-Amz-Algorithm": _ALGORITHM,
        "X-Amz-Credential": f"{bucket.access_key}/{scope}",
        "X-Amz-Date": stamp,
        "X-Amz-Expires": str(min(_LONGEST_LIFE_S, max(1, int(expires_at_s - now)))),
        "X-Amz-SignedHeaders": names,
    }
    query = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(fields.items()))
    path = quote(f"{endpoint.path}/{bucket.name}/{bucket.path_of(key)}")
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    request = "\n".join((method, path, query, lines, names, "UNSIGNED-PAYLOAD"))
    to_sign = "\n".join((_ALGORITHM, stamp, scope, hashlib.sha256(request.encode()).hexdigest()))
    secret = f"AWS4{bucket.secret_key}".encode()
    for part in (day, bucket.region, "s3", "aws4_request"):
        secret = hmac.new(secret, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, to_sign.encode(), hashlib.sha256).hexdigest()
    return f"{endpoint.scheme}://{endpoint.netloc}{path}?{query}&X-Amz-Signature={signature}"
