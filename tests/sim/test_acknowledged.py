"""What a miner keeps of the orchestrator's word in a whole run stands on record, restarts included (trust.md 1.1)."""

import asyncio
from collections.abc import Callable

import msgspec

from neurons.ack_checks import check_acks
from neurons.checks import History
from neurons.roles.ports import MinerPorts
from neurons.virtual import Kill, VirtualPlan
from subnet.adapters.auth import KeypairSigner
from subnet.ports import Disk
from subnet.receipts import KeptAck
from subnet.types import Phase
from tests.sim.world import QUICK, epochs, simulate

NUM_MINERS = 3


async def kept_on(disks: dict[str, Disk]) -> list[KeptAck]:
    found = []
    for _, disk in sorted(disks.items()):
        for name in await disk.names():
            data = await disk.read(name)
            if name.startswith("ack-") and data is not None:
                found.append(msgspec.json.decode(data, type=KeptAck))
    return found


def test_what_miners_were_acknowledged_is_on_record_also_after_a_kill() -> None:
    """One is killed in training, and goes on from a checkpoint that holds less than was acknowledged."""
    disks: dict[str, Disk] = {}

    def watching(name: str) -> Callable[[MinerPorts], MinerPorts]:
        def look(ports: MinerPorts) -> MinerPorts:
            disks[name] = ports.disk
            return ports

        return look

    plan = VirtualPlan(
        seed=4,
        num_miners=NUM_MINERS,
        miner_ports={f"m{n + 1}": watching(f"m{n + 1}") for n in range(NUM_MINERS)},
        kills=(Kill(name="m2", at_s=2.0, down_s=2.0, phase=Phase.TRAINING),),
    )
    result = simulate(plan, QUICK)
    acks = asyncio.run(kept_on(disks))
    assert len(acks) == NUM_MINERS * len(epochs(result))
    history = History(owner=result.hotkeys["orchestrator"], record=result.record)
    found = check_acks(history, acks, KeypairSigner.from_uri("//reader").verify)
    assert (found.holds, found.detail) == (True, f"{len(acks)} acknowledgements covered")
