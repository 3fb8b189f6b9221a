"""Signatures with Bittensor keys, and signed requests by btauth/1 (trust.md 6, chain.md 1).

A signature is spelled as lower-case hex of 64 bytes; sr25519 bare, ed25519 with the prefix `ed25519:`, so that a verifier
never tries both. ed25519 is deterministic, which the simulation needs.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bittensor import http_auth
from bittensor.sp_core import CRYPTO_ED25519, CRYPTO_SR25519, Keypair, ss58_decode, ss58_encode, verify

from subnet.errors import Refused
from subnet.ports import Clock
from subnet.types import Hotkey

MAX_AGE_S = 10.0
MAX_AHEAD_S = 2.0
NONCE_MEMORY_S = MAX_AGE_S + MAX_AHEAD_S + 1.0
"""How long a nonce must be remembered: longer than a request can be fresh."""

_SS58_FORMAT = 42
_SPELLING = re.compile(r"(ed25519:)?([0-9a-f]{128})")
_HEADERS_LIMIT_BYTES = 200
_CODES: dict[type[http_auth.AuthError], str] = {
    http_auth.MalformedAuth: "malformed_auth",
    http_auth.WrongReceiver: "wrong_receiver",
    http_auth.StaleRequest: "stale_request",
    http_auth.BadSignature: "bad_signature",
}
REPLAYED = "replayed_request"
AUTH_CODES = frozenset({*_CODES.values(), REPLAYED})
"""Codes of `Refused` that `verify_request` raises; HTTP status 401."""


class NonceMemory(Protocol):
    """What stops replays."""

    async def remember_once(self, key: str, *, for_s: float) -> bool:
        """True the first time `key` is seen within `for_s` seconds."""
        ...


class KeypairSigner:
    """A hotkey in this process (ports.Signer)."""

    def __init__(self, keypair: Keypair) -> None:
        self.keypair = keypair
        self._prefix = "ed25519:" if keypair.crypto_type == CRYPTO_ED25519 else ""

    @classmethod
    def from_uri(cls, uri: str, *, deterministic: bool = False) -> "KeypairSigner":
        """Development key such as `//Alice`; `deterministic` takes ed25519, whose signatures repeat bit for bit."""
        return cls(Keypair.create_from_uri(uri, crypto_type=CRYPTO_ED25519 if deterministic else CRYPTO_SR25519))

    @property
    def hotkey(self) -> Hotkey:
        """The address whose signatures `sign` makes."""
        return Hotkey(self.keypair.ss58_address)

    def sign(self, message: bytes) -> str:
        """Signature of `message`, spelled with its scheme."""
        return self._prefix + bytes(self.keypair.sign(message)).hex()

    def verify(self, hotkey: Hotkey, message: bytes, signature: str) -> bool:
        """Whether `signature` is `hotkey`'s of `message`; malformed input is False."""
        spelled = _SPELLING.fullmatch(signature)
        if spelled is None:
            return False
        scheme = CRYPTO_ED25519 if spelled[1] else CRYPTO_SR25519
        try:
            return bool(verify(message, bytes.fromhex(spelled[2]), hotkey, scheme)) and _is_canonical(hotkey)
        except ValueError:  # an address that does not decode
            return False


@functools.lru_cache(maxsize=4096)
def _is_canonical(address: str) -> bool:
    """Whether this is the one spelling of its key that the chain uses: a key under two names would be two miners."""
    return bool(ss58_encode(ss58_decode(address), _SS58_FORMAT) == address)


class RequestSigner:
    """Signs requests of one hotkey; each gets a nonce of its own, even when the clock stands still."""

    def __init__(self, signer: KeypairSigner, clock: Clock) -> None:
        self._signer = signer
        self._clock = clock
        self._last_nonce_ns = 0

    def headers(self, method: str, path: str, *, receiver: Hotkey, body: bytes = b"") -> dict[str, str]:
        """btauth/1 headers; `path` is the request target as sent, query included."""
        self._last_nonce_ns = max(self._last_nonce_ns + 1, int(self._clock.now() * 1e9))
        return sign_request(
            self._signer, method=method, path=path, body=body, receiver=receiver, nonce_ns=self._last_nonce_ns
        )


def sign_request(
    signer: KeypairSigner, *, method: str, path: str, receiver: Hotkey, nonce_ns: int, body: bytes = b""
) -> dict[str, str]:
    """btauth/1 headers for one attempt; a retry signs again with a new nonce."""
    return http_auth.sign(
        signer.keypair, method=method, path=path, body=body, receiver_ss58=receiver, nonce_ns=nonce_ns
    )


@dataclass(frozen=True, slots=True)
class _AcceptAll:
    """Stands in for the SDK's synchronous nonce store; the replay check is awaited afterwards."""

    def check_and_store(self, hotkey_ss58: str, nonce_ns: int) -> bool:
        return True


_ACCEPT_ALL = _AcceptAll()


async def verify_request(
    headers: Mapping[str, str],
    body: bytes,
    *,
    method: str,
    path: str,
    receiver: Hotkey,
    memory: NonceMemory,
    now: float,
    signed_after_s: float = 0.0,
) -> Hotkey:
    """The hotkey that signed this request to `receiver`, later than `signed_after_s` (unix s).

    Raises Refused with one of AUTH_CODES.
    """
    claims = [value for name, value in headers.items() if name.lower().startswith("x-bittensor")]
    # The SDK encodes what it checks as UTF-8, which bytes that a stranger sent for a key need not be.
    if not path.isascii() or any(len(value) > _HEADERS_LIMIT_BYTES or not value.isascii() for value in claims):
        reason = f"a signature header is no ASCII or longer than {_HEADERS_LIMIT_BYTES} characters"
        raise Refused("malformed_auth", reason)
    now_ns = int(now * 1e9)
    checks: dict[str, Any] = {"max_age": MAX_AGE_S, "allowed_skew": MAX_AHEAD_S, "now_ns": now_ns}
    try:
        caller = http_auth.verify(
            headers, body, method=method, path=path, self_hotkey_ss58=receiver, nonce_store=_ACCEPT_ALL, **checks
        )
    except http_auth.StaleRequest as error:
        raise Refused(
            "stale_request", f"{error}; set the clock of one of the two machines (server: {now:.0f})"
        ) from error
    except http_auth.AuthError as error:
        raise Refused(_CODES.get(type(error), "malformed_auth"), str(error)) from error
    if caller.nonce_ns <= int(signed_after_s * 1e9):
        raise Refused("stale_request", "this node had not begun when that was signed; sign it anew")
    if not _is_canonical(caller.hotkey_ss58):
        raise Refused("malformed_auth", f"spell the hotkey in SS58 format {_SS58_FORMAT}")
    if not await memory.remember_once(f"nonce:{caller.hotkey_ss58}:{caller.nonce_ns}", for_s=NONCE_MEMORY_S):
        raise Refused(REPLAYED, "this request was already accepted; sign each attempt anew")
    return Hotkey(caller.hotkey_ss58)
