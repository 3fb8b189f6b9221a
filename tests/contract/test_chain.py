"""The Chain port: the same promises on the chain in memory and, through the Bittensor SDK, on a devnet."""

import json
import math

import pytest

from subnet.errors import NotFound, Refused, TransientFailure
from subnet.types import Endpoint
from tests.contract.chain_harness import KINDS, NETUID, TEMPO, Subnet, hotkey, subnet

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def permitted(net: Subnet) -> None:
    """A validator with a permit, two miners."""
    await net.register("Val", stake=1_000)
    await net.register("M0")
    await net.register("M1")
    await net.pass_epochs(1)


async def test_blocks_are_final_a_little_later_and_stay_the_same(kind: str) -> None:
    async with subnet(kind) as net:
        chain = net.chain("Alice")
        block = await chain.block()
        assert await chain.block_hash(block + 50) is None
        await net.pass_blocks(4)
        digest = await chain.block_hash(block)
        assert digest is not None and digest.startswith("0x") and len(digest) == 66
        await net.pass_blocks(2)
        assert await chain.block() >= block + 6
        assert await chain.block_hash(block) == digest


async def test_metagraph_has_the_owner_first_and_everyone_registered(kind: str) -> None:
    async with subnet(kind) as net:
        await net.register("Val", stake=250)
        await net.register("M0")
        metagraph = await net.chain("M0").metagraph()
        assert (metagraph.netuid, metagraph.tempo, metagraph.owner_hotkey) == (NETUID, TEMPO, net.owner)
        assert [neuron.hotkey for neuron in metagraph.neurons] == [net.owner, hotkey("Val"), hotkey("M0")]
        assert [neuron.uid for neuron in metagraph.neurons] == [0, 1, 2]
        validator = metagraph.neurons[1]
        assert validator.stake >= 250 - 1e-6  # an epoch may have paid it already
        assert validator.endpoint is None and validator.is_active
        assert 0 <= validator.registered_at_block <= metagraph.at_block


async def test_a_netuid_that_does_not_exist_is_not_found(kind: str) -> None:
    async with subnet(kind) as net:
        with pytest.raises(NotFound):
            await net.missing_netuid().metagraph()


async def test_a_chain_out_of_reach_is_a_transient_failure(kind: str) -> None:
    async with subnet(kind) as net:
        with pytest.raises(TransientFailure):
            await net.unreachable().block()


@pytest.mark.parametrize(
    "record",
    [
        json.dumps({"u": "http://127.0.0.1:8000", "r": "run-1"}).encode(),
        json.dumps({"u": "http://127.0.0.1:8000", "digests": ["ab" * 32] * 4}).encode(),
        json.dumps({"u": "x" * 700}).encode(),
        bytes(range(256)) * 2,
    ],
    ids=["short", "two fields", "long text", "binary"],
)
async def test_a_commitment_reads_back_to_the_byte(kind: str, record: bytes) -> None:
    async with subnet(kind) as net:
        chain = net.chain("Alice")
        assert await chain.commitment(net.owner) is None
        before = await chain.block()
        block = await chain.commit(record)
        assert block > before
        assert await net.chain("M0").commitment(net.owner) == record
        assert await chain.commit(record) == block
        assert await chain.commit(record[::-1]) > block
        assert await chain.commitment(net.owner) == record[::-1]


async def test_a_commitment_needs_a_registration_and_has_a_size_limit(kind: str) -> None:
    async with subnet(kind) as net:
        with pytest.raises(Refused):
            await net.chain("Stranger").commit(b"hello")
        with pytest.raises(Refused):
            await net.chain("Alice").commit(bytes(4_000))
        with pytest.raises(Refused):
            await net.chain("Alice").commit(b"")


async def test_commitments_have_an_allowance_for_each_tempo(kind: str) -> None:
    async with subnet(
        kind, tempo=5 * TEMPO
    ) as net:  # on a busy machine three commits take longer than a tempo of 0.6 s
        chain = net.chain("Alice")
        with pytest.raises(Refused) as refused:
            for part in range(30):
                await chain.commit(bytes([part]) * 1_200)
        assert refused.value.code == "SpaceLimitExceeded"
        await net.pass_epochs(5)
        await chain.commit(b"after the epoch")


async def test_weights_read_back_by_uid(kind: str) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        chain = net.chain("Val")
        block = await chain.set_weights({hotkey("M0"): 0.75, hotkey("M1"): 0.25, hotkey("Gone"): 0.0})
        assert block <= await chain.block()
        assert await net.chain("M0").weights(hotkey("Val")) == {2: 65_535, 3: 21_845}
        assert await chain.weights(hotkey("M0")) == {}
        assert await chain.weights(hotkey("Gone")) == {}
        metagraph = await chain.metagraph()
        assert metagraph.by_hotkey()[hotkey("Val")].last_update_block == block


async def test_the_same_weights_are_not_set_twice_in_a_tempo_and_others_wait_for_the_limit(kind: str) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        chain = net.chain("Val")
        block = await chain.set_weights({hotkey("M0"): 1.0})
        assert await chain.set_weights({hotkey("M0"): 1.0}) in (block, *range(block + TEMPO - 4, block + 2 * TEMPO))
        assert await chain.set_weights({hotkey("M1"): 1.0}) >= block + 2
        assert await chain.weights(hotkey("Val")) == {3: 65_535}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
async def test_a_weight_that_is_no_number_is_refused_and_nothing_is_set(kind: str, bad: float) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        with pytest.raises(Refused) as refused:
            await net.chain("Val").set_weights({hotkey("M0"): 0.5, hotkey("M1"): bad})
        assert refused.value.code == "bad_weight"
        assert await net.chain("Val").weights(hotkey("Val")) == {}


async def test_weights_need_somebody_registered(kind: str) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        with pytest.raises(Refused):
            await net.chain("Val").set_weights({hotkey("Gone"): 1.0})
        with pytest.raises(Refused) as refused:
            await net.chain("Stranger").set_weights({hotkey("M0"): 1.0})
        assert refused.value.code == "not_registered"


async def test_weights_need_a_permit(kind: str) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        with pytest.raises(Refused) as refused:
            await net.chain("M0").set_weights({hotkey("M1"): 1.0})
        assert refused.value.code == "NeuronNoValidatorPermit"


async def test_an_outdated_build_may_not_set_weights(kind: str) -> None:
    async with subnet(kind, weights_version=5) as net:
        await permitted(net)
        with pytest.raises(Refused) as refused:
            await net.chain("Val", version_key=4).set_weights({hotkey("M0"): 1.0})
        assert refused.value.code == "version_key"
        assert "update" in refused.value.reason
        await net.chain("Val", version_key=5).set_weights({hotkey("M0"): 1.0})


async def test_weights_keep_the_subnets_limits(kind: str) -> None:
    async with subnet(kind, max_weights_limit=39_321, min_allowed_weights=2) as net:
        await permitted(net)
        chain = net.chain("Val")
        await chain.set_weights({hotkey("M0"): 0.9, hotkey("M1"): 0.1})
        values = await chain.weights(hotkey("Val"))
        assert max(values.values()) / sum(values.values()) == pytest.approx(0.6, abs=1e-4)
        with pytest.raises(Refused) as refused:
            await chain.set_weights({hotkey("M0"): 1.0})
        assert refused.value.code == "too_few_weights"


async def test_an_endpoint_is_announced_and_can_change(kind: str) -> None:
    async with subnet(kind) as net:
        await net.register("M0")
        chain = net.chain("M0")
        for port in (8_091, 8_092):
            await chain.serve(Endpoint(host="127.0.0.1", port=port))
            await chain.serve(Endpoint(host="127.0.0.1", port=port))
            found = (await chain.metagraph()).by_hotkey()[hotkey("M0")].endpoint
            assert found == Endpoint(host="127.0.0.1", port=port)


async def test_miners_are_paid_by_weight_and_validators_by_their_bonds(kind: str) -> None:
    async with subnet(kind) as net:
        await permitted(net)
        await net.chain("Val").set_weights({hotkey("M0"): 0.75, hotkey("M1"): 0.25})
        await net.pass_epochs(2)
        neurons = (await net.chain("M0").metagraph()).by_hotkey()
        first, second, validator = (neurons[hotkey(name)] for name in ("M0", "M1", "Val"))
        assert first.incentive == pytest.approx(0.75, abs=1e-4)
        assert first.emission == pytest.approx(3 * second.emission, rel=1e-4)
        assert validator.emission == pytest.approx(first.emission + second.emission, rel=1e-6)
        assert first.stake >= first.emission and validator.stake > 1_000
        assert validator.dividends == pytest.approx(1.0, abs=1e-4)
