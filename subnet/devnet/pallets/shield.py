"""MevShield: extrinsics that travel encrypted and are opened by the block's author.

ML-KEM-768 wraps a key, XChaCha20-Poly1305 the signed inner extrinsic. A mainnet author rotates its key;
this node keeps one, which clients cannot tell.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from Crypto.Cipher import ChaCha20_Poly1305
from kyber_py.ml_kem import ML_KEM_768

from subnet.devnet.context import Context, DispatchFailure
from subnet.devnet.scale import Reader, compact, vector
from subnet.errors import ProtocolViolation

_KEY_HASH_BYTES = 16
_NONCE_BYTES = 24
_TAG_BYTES = 16


class Shield:
    """The author's key pair, derived from a seed so that it survives a restart."""

    def __init__(self, seed: bytes) -> None:
        material = hashlib.sha512(b"shield" + seed).digest()
        self.public_key, self._secret_key = ML_KEM_768.key_derive(material)

    def open(self, ciphertext: bytes) -> bytes:
        """The inner extrinsic with its length in front. Raises ProtocolViolation when it does not open."""
        reader = Reader(ciphertext)
        reader.take(_KEY_HASH_BYTES)
        wrapped = reader.take(reader.integer(2))
        nonce = reader.take(_NONCE_BYTES)
        sealed = reader.rest()
        try:
            key = ML_KEM_768.decaps(self._secret_key, wrapped)
            cipher = ChaCha20_Poly1305.new(key=key, nonce=nonce)
            inner = cipher.decrypt_and_verify(sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:])
        except ValueError as error:
            raise ProtocolViolation(f"shielded extrinsic does not open: {error}") from error
        body = Reader(inner)
        is_prefixed = body.compact() == len(inner) - body.position
        return bytes(inner) if is_prefixed else vector(inner)


def ciphertext_of(args: Mapping[str, Any]) -> bytes:
    """The ciphertext argument as bytes; the codec gives hex, or text when the bytes happen to be text."""
    value = args["ciphertext"]
    if isinstance(value, str):
        return bytes.fromhex(value[2:]) if value.startswith("0x") else value.encode()
    return bytes(value)


def _submit_encrypted(ctx: Context, who: str, args: Mapping[str, Any]) -> None:
    """Take the envelope; the block's author applies what is inside right after it."""
    ciphertext = ciphertext_of(args)
    if len(ciphertext) <= _KEY_HASH_BYTES + len(compact(0)) + _NONCE_BYTES + _TAG_BYTES:
        raise DispatchFailure("Unreachable", pallet="MevShield")
    digest = hashlib.blake2b(ciphertext, digest_size=32).hexdigest()
    ctx.emit("MevShield", "EncryptedSubmitted", {"id": "0x" + digest, "who": who})


CALLS = {("MevShield", "submit_encrypted"): _submit_encrypted}
