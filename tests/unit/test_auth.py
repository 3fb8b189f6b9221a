"""Signatures and signed requests: what is accepted, and every way a stranger may bend them."""

from typing import Any

import pytest
from bittensor import http_auth
from bittensor.sp_core import ss58_encode
from hypothesis import given
from hypothesis import strategies as st

from subnet.adapters.auth import AUTH_CODES, MAX_AHEAD_S, KeypairSigner, RequestSigner, verify_request
from subnet.adapters.memory import ManualClock, ReplayMemory
from subnet.errors import Refused
from subnet.types import Hotkey

ALICE = KeypairSigner.from_uri("//Alice")
BOB = KeypairSigner.from_uri("//Bob", deterministic=True)
SIGNERS = pytest.mark.parametrize("signer", [ALICE, BOB], ids=["sr25519", "ed25519"])


@SIGNERS
def test_a_signature_fits_its_key_and_message_only(signer: KeypairSigner) -> None:
    signature = signer.sign(b"message")
    other = BOB if signer is ALICE else ALICE
    assert other.verify(signer.hotkey, b"message", signature)
    assert not other.verify(signer.hotkey, b"massage", signature)
    assert not other.verify(other.hotkey, b"message", signature)


def test_ed25519_repeats_and_is_spelled_apart() -> None:
    assert BOB.sign(b"m") == BOB.sign(b"m")
    assert BOB.sign(b"m").startswith("ed25519:")
    assert not ALICE.verify(BOB.hotkey, b"m", BOB.sign(b"m").removeprefix("ed25519:"))


@given(st.text(), st.text())
def test_malformed_signatures_are_false_never_an_error(hotkey: str, signature: str) -> None:
    assert not ALICE.verify(Hotkey(hotkey), b"m", signature)
    assert not ALICE.verify(Hotkey(hotkey), b"m", "00" * 64)
    assert not ALICE.verify(ALICE.hotkey, b"m", signature)


def test_one_key_has_one_spelling() -> None:
    signature = ALICE.sign(b"m")
    assert not BOB.verify(Hotkey(ss58_encode(ALICE.keypair.public_key, 0)), b"m", signature)
    assert not BOB.verify(ALICE.hotkey, b"m", signature.upper())
    assert not BOB.verify(ALICE.hotkey, b"m", "0x" + signature)


async def _verify(
    headers: dict[str, str],
    clock: ManualClock,
    *,
    body: bytes = b"{}",
    path: str = "/v1/x?y=1",
    signed_after_s: float = 0.0,
) -> Hotkey:
    return await verify_request(
        headers,
        body,
        method="POST",
        path=path,
        receiver=BOB.hotkey,
        memory=ReplayMemory(clock),
        now=clock.now(),
        signed_after_s=signed_after_s,
    )


@SIGNERS
async def test_a_signed_request_names_its_sender(signer: KeypairSigner) -> None:
    clock = ManualClock()
    headers = RequestSigner(signer, clock).headers("POST", "/v1/x?y=1", receiver=BOB.hotkey, body=b"{}")
    assert await _verify(headers, clock) == signer.hotkey


async def _code(headers: dict[str, str], clock: ManualClock, **given: Any) -> str:
    with pytest.raises(Refused) as refused:
        await _verify(headers, clock, **given)
    assert refused.value.code in AUTH_CODES
    return refused.value.code


async def test_bent_requests_are_refused_each_with_its_code() -> None:
    clock = ManualClock()
    signer = RequestSigner(ALICE, clock)
    headers = signer.headers("POST", "/v1/x?y=1", receiver=BOB.hotkey, body=b"{}")
    assert await _code(headers, clock, body=b"{ }") == "bad_signature"
    assert await _code(headers, clock, path="/v1/x?y=2") == "bad_signature"
    assert await _code(headers | {"X-Bittensor-Hotkey": BOB.hotkey}, clock) == "bad_signature"
    assert await _code({**headers, "X-Bittensor-Receiver": ALICE.hotkey}, clock) == "wrong_receiver"
    redirected = signer.headers("POST", "/v1/x?y=1", receiver=ALICE.hotkey, body=b"{}")
    assert await _code(redirected, clock) == "wrong_receiver"
    assert (
        await _code({name: value for name, value in headers.items() if "Receiver" not in name}, clock)
        == "wrong_receiver"
    )
    assert await _code({}, clock) == "malformed_auth"
    assert await _code({**headers, "X-Bittensor-Signature": "0x" + "0" * 5000}, clock) == "malformed_auth"
    assert await _code({**headers, "X-Bittensor-Nonce": "9" * 5000}, clock) == "malformed_auth"
    # a byte that is no UTF-8, as the server reads it
    assert await _code({**headers, "X-Bittensor-Hotkey": "\udcff"}, clock) == "malformed_auth"


@pytest.mark.parametrize("name", ["Hotkey", "Receiver", "Nonce", "Signature", "Crypto", "Version"])
@pytest.mark.parametrize("value", ["5\udcff\udcfe", "5\xff", "\u0661\u0662"], ids=["no UTF-8", "Latin-1", "digits"])
async def test_a_header_that_is_no_ascii_is_refused_and_never_an_error(name: str, value: str) -> None:
    """aiohttp hands on bytes that are no UTF-8 as lone surrogates, which nothing can encode again."""
    clock = ManualClock()
    headers = RequestSigner(ALICE, clock).headers("POST", "/v1/x?y=1", receiver=BOB.hotkey, body=b"{}")
    assert await _code(headers | {f"X-Bittensor-{name}": value}, clock) == "malformed_auth"
    assert await _code(headers, clock, path=f"/v1/{value}") == "malformed_auth"


async def test_stale_and_future_requests_are_refused() -> None:
    clock = ManualClock()
    headers = RequestSigner(ALICE, clock).headers("POST", "/v1/x?y=1", receiver=BOB.hotkey, body=b"{}")
    assert await _code(headers, ManualClock(clock.now() + 10.5)) == "stale_request"
    assert await _code(headers, ManualClock(clock.now() - 2.5)) == "stale_request"


async def test_another_spelling_of_the_key_is_refused() -> None:
    clock = ManualClock()
    alias, nonce_ns = ss58_encode(ALICE.keypair.public_key, 0), int(clock.now() * 1e9)
    payload = http_auth.build_payload(
        scheme="sr25519",
        method="POST",
        path="/v1/x?y=1",
        body=b"{}",
        nonce_ns=nonce_ns,
        sender_ss58=alias,
        receiver_ss58=BOB.hotkey,
    )
    headers = {
        "X-Bittensor-Version": "1",
        "X-Bittensor-Hotkey": alias,
        "X-Bittensor-Receiver": BOB.hotkey,
        "X-Bittensor-Nonce": str(nonce_ns),
        "X-Bittensor-Signature": ALICE.sign(payload),
    }
    assert await _code(headers, clock) == "malformed_auth"


async def test_a_replayed_nonce_is_refused_and_each_attempt_has_its_own() -> None:
    clock = ManualClock()
    memory = ReplayMemory(clock)
    signer = RequestSigner(ALICE, clock)
    first, second = (signer.headers("POST", "/", receiver=BOB.hotkey) for _ in range(2))
    for headers in (first, second):
        await verify_request(headers, b"", method="POST", path="/", receiver=BOB.hotkey, memory=memory, now=clock.now())
    with pytest.raises(Refused) as refused:
        await verify_request(first, b"", method="POST", path="/", receiver=BOB.hotkey, memory=memory, now=clock.now())
    assert refused.value.code == "replayed_request"


async def test_a_key_is_new_once_until_its_time_is_over() -> None:
    clock = ManualClock()
    memory = ReplayMemory(clock)
    assert [await memory.remember_once(key, for_s=60) for key in ("a", "b", "a")] == [True, True, False]
    await clock.sleep(60)
    assert await memory.remember_once("a", for_s=60)
    assert not await memory.remember_once("a", for_s=60)


async def test_what_a_process_before_this_one_may_have_taken_is_stale() -> None:
    """The clock of who signed may be ahead by MAX_AHEAD_S; what is signed later than that was never taken."""
    clock = ManualClock()
    signer = RequestSigner(ALICE, ManualClock(clock.now() + MAX_AHEAD_S))
    taken, fresh = (signer.headers("POST", "/v1/x?y=1", receiver=BOB.hotkey, body=b"{}") for _ in range(2))
    assert await _verify(taken, clock) == ALICE.hotkey
    signed_after_s = clock.now() + MAX_AHEAD_S
    await clock.sleep(0.5)
    assert await _code(taken, clock, signed_after_s=signed_after_s) == "stale_request"
    assert await _verify(fresh, clock, signed_after_s=signed_after_s) == ALICE.hotkey
