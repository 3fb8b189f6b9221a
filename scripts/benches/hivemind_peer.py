"""One peer of a hivemind all-reduce, run by an interpreter that has hivemind and none of our packages.

    pip install torch==2.13.0 && pip install hivemind==1.1.12 'numpy<2.4'

The first line of stdout is where the peer listens. Then each line of stdin is answered by one: "gather" when the group has
formed, "reduce" with the seconds from there to the mean and the size of the group. It ends with its stdin.
"""

import json
import sys
import time

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import get_dht_time

_LIMIT_S = 60.0
_MATCHMAKING_S = 3.0


def main(rank: int, size: int, num_elements: int, initial_peers: list[str]) -> None:
    """Average `num_elements` float32 values among `size` peers, as often as told."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=initial_peers)
    _say([str(address) for address in dht.get_visible_maddrs()])
    averager = hivemind.DecentralizedAverager(
        [torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))],
        dht,
        start=True,
        prefix="merge",
        target_group_size=size,
        min_group_size=size,
        min_matchmaking_time=_MATCHMAKING_S,
        request_timeout=_MATCHMAKING_S / 2,
    )
    control: StepControl | None = None
    for line in sys.stdin:
        if line.strip() == "gather":
            at_s = get_dht_time() + _MATCHMAKING_S
            control = averager.step(wait=False, require_trigger=True, scheduled_time=at_s, timeout=_LIMIT_S)
            while control.stage != AveragingStage.AWAITING_TRIGGER and not control.done():
                time.sleep(0.01)
            _say(control.stage.name)
        elif control is not None:
            began = time.monotonic()
            control.allow_allreduce()
            group = control.result(timeout=_LIMIT_S)
            _say({"s": time.monotonic() - began, "group": len(group or ())})
    averager.shutdown()
    dht.shutdown()


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
