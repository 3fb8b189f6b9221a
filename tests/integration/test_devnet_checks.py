"""The doctor's facts, read from a devnet."""

import time

from bittensor.keyfiles import Keypair

from neurons.chain_checks import Role, findings, read_facts
from subnet.adapters.chain import BittensorChain
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.node import Node
from subnet.types import Hotkey

ALICE, STRANGER = (Keypair.create_from_uri(f"//{name}").ss58_address for name in ("Alice", "Stranger"))


async def test_a_subnet_that_was_never_started_and_a_stranger_on_it() -> None:
    genesis = SubnetGenesis(netuid=1, is_started=False, hyperparameters={"tempo": 10, "immunity_period": 5})
    async with Node(DevnetConfig(port=0, block_time_s=0.05, subnets=(genesis,))).running() as node:
        chain = BittensorChain(node.url, 1)
        facts = await read_facts(chain, Hotkey(STRANGER), coldkey=STRANGER, now_s=time.time())
        codes = [finding.code for finding in findings(facts, Role.MINER, version_key=1)]
        assert {"earns_nothing", "no_run", "not_registered", "balance", "immunity_short", "clock"} <= set(codes)
        late = await read_facts(chain, Hotkey(ALICE), coldkey=ALICE, now_s=time.time() - 60)
        assert "clock_skew" in [finding.code for finding in findings(late, Role.OWNER, version_key=1)]
        assert "knobs_frozen" in [finding.code for finding in findings(late, Role.OWNER, version_key=1)]
        await chain.close()
