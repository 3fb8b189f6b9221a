"""Control plane: a thousand simulated miners post signed receipts to one real orchestrator, journal and flush included."""

import asyncio
import math
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice

from benches.fleet import EPOCH, LEASES_AT_ONCE, Chain, chains, created, fleet_config, join, keys, ready
from benches.measure import Child, Line, children, fact, floor, limit, median, percentile, run_loop
from benches.owner import OWNER, orchestrator_process
from neurons.lifecycle import spare_what_is_loaded
from subnet import wire
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.http_client import HttpControl, open_session
from subnet.adapters.system import SystemClock
from subnet.config import RunConfig
from subnet.errors import Refused, TransientFailure
from subnet.orchestration import machine
from subnet.orchestration.events import Answer, ChainSeen, Requested, encode_event
from subnet.orchestration.state import State
from subnet.types import Hotkey, Lease

NUM_MINERS = 1000
NUM_STAGES = 8
RECEIPTS_PER_POST = 4
"""A miner that does two receipts a second posts these every two seconds."""
OFFERED_PER_S = 2000
_IN_PROGRESS = 64
_STEADY_S = 8.0


def _machine_alone(config: RunConfig, hotkeys: list[Hotkey]) -> list[Line]:
    """The state machine without anything around it."""
    state = State()
    machine.step(state, created(config), config)
    registered = tuple((hotkey, 1) for hotkey in sorted(hotkeys))
    machine.step(state, ChainSeen(at_s=1.0, registered=registered, permits=()), config)
    numbers = iter(range(1 << 62))

    def ask(hotkey: Hotkey, request: wire.Request) -> wire.Response:
        event = Requested(at_s=1.0, sender=hotkey, request_id=str(next(numbers)), request=request)
        [answer] = [effect for effect in machine.step(state, event, config) if isinstance(effect, Answer)]
        return answer.response

    for hotkey in hotkeys:
        ask(hotkey, join())
    for hotkey in hotkeys:
        ask(hotkey, ready(config, state.members[hotkey].stage))
    leases: list[Lease] = []
    began = time.process_time()
    for hotkey in state.current.roster[0]:
        answer = ask(hotkey, wire.LeaseSamples(epoch=EPOCH, count=2))
        assert isinstance(answer, wire.Leases)
        leases += answer.leases
    lease_s = (time.process_time() - began) / len(leases)
    posts = [(hotkey, chain.next_post(RECEIPTS_PER_POST)) for hotkey, chain in chains(leases).items()]
    began = time.process_time()
    for hotkey, post in posts:
        assert post is None or isinstance(ask(hotkey, post), wire.Ack)
    post_s = (time.process_time() - began) / len(posts)
    return [
        fact(
            f"state machine alone, {len(hotkeys)} miners",
            f"{1 / post_s:,.0f} posts/s = {RECEIPTS_PER_POST / post_s:,.0f} receipts/s of CPU; a lease {1e3 * lease_s:.2f} ms",
        )
    ]


class _Fleet:
    """Every miner's side of the exchange."""

    def __init__(self, controls: dict[Hotkey, HttpControl], chains_of: dict[Hotkey, Chain]) -> None:
        self._controls = controls
        self._chains = chains_of
        self._turns: Iterator[Hotkey] = cycle(sorted(chains_of))
        self._locks = {hotkey: asyncio.Lock() for hotkey in chains_of}
        self.times: list[float] = []
        self.num_receipts = 0

    def _next(self) -> Hotkey | None:
        """The next miner that has something to post."""
        return next(
            (hotkey for hotkey in islice(self._turns, len(self._chains)) if self._chains[hotkey].num_left), None
        )

    async def _post(self, hotkey: Hotkey, count: int) -> None:
        """One post; a miner's posts follow each other, and waiting for the one before counts as well."""
        began = time.perf_counter()
        async with self._locks[hotkey]:
            request = self._chains[hotkey].next_post(count)
            if request is None:
                return
            try:
                assert isinstance(await self._controls[hotkey].call(request), wire.Ack)
            except (TransientFailure, Refused):  # no answer in time; what follows on this chain is then refused
                self.times.append(math.inf)
                return
        self.times.append(time.perf_counter() - began)
        self.num_receipts += len(request.receipts)

    async def as_fast_as_possible(self, count: int, duration_s: float) -> float:
        """Receipts a second with a fixed number of posts in progress."""
        self.times, self.num_receipts = [], 0
        until = time.monotonic() + duration_s

        async def post_on() -> None:
            while time.monotonic() < until and (hotkey := self._next()) is not None:
                await self._post(hotkey, count)

        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(_IN_PROGRESS):
                group.create_task(post_on())
        return self.num_receipts / (time.monotonic() - began)

    async def steadily(self, count: int, per_s: float, duration_s: float) -> float:
        """Receipts a second when posts begin on a fixed beat, whatever the answers take."""
        self.times, self.num_receipts = [], 0
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(round(per_s * duration_s / count)):
                await asyncio.sleep(max(0.0, began + number * count / per_s - time.monotonic()))
                hotkey = self._next()
                if hotkey is None:
                    break
                group.create_task(self._post(hotkey, count))
        return self.num_receipts / (time.monotonic() - began)


async def _prepare(
    child: Child, config: RunConfig, controls: dict[Hotkey, HttpControl], num_samples: int
) -> list[Lease]:
    """Join, get ready, lease; returns the leases."""
    limiter = asyncio.Semaphore(_IN_PROGRESS)

    async def call(hotkey: Hotkey, request: wire.Request) -> wire.Response:
        async with limiter:
            return await controls[hotkey].call(request, timeout_s=120.0)

    for _ in range(300):  # the first look at the chain is the orchestrator's own affair
        if (await child.ask_later("state"))["registered"] >= len(controls):
            break
        await asyncio.sleep(0.1)
    await asyncio.gather(*(call(hotkey, join()) for hotkey in controls))
    stages = (await child.ask_later("state"))["stages"]
    await asyncio.gather(*(call(hotkey, ready(config, stages[hotkey])) for hotkey in controls))
    first = [hotkey for hotkey in controls if stages[hotkey] == 0]
    count = min(LEASES_AT_ONCE, -(-num_samples // len(first)))
    answers = await asyncio.gather(*(call(hotkey, wire.LeaseSamples(epoch=EPOCH, count=count)) for hotkey in first))
    return [lease for answer in answers if isinstance(answer, wire.Leases) for lease in answer.leases]


async def _measure(child: Child, config: RunConfig, fleet_keys: list[KeypairSigner], scale: float) -> list[Line]:
    steady_s = _STEADY_S * scale
    url = (await child.ask_later("where"))["url"]
    async with open_session(max_connections=_IN_PROGRESS * 4) as session:
        clock = SystemClock()
        controls = {
            key.hotkey: HttpControl(session, url, signer=key, orchestrator=OWNER.hotkey, clock=clock)
            for key in fleet_keys
        }
        wanted = round(6.5 * OFFERED_PER_S * steady_s / (2 * NUM_STAGES))
        fleet = _Fleet(controls, chains(await _prepare(child, config, controls, wanted)))
        await fleet.as_fast_as_possible(RECEIPTS_PER_POST, 1.0)
        before, began = await child.ask_later("state"), time.process_time()
        fastest = await fleet.as_fast_as_possible(RECEIPTS_PER_POST, steady_s)
        after, ours_s = await child.ask_later("state"), time.process_time() - began
        num_posts, num_receipts = len(fleet.times), fleet.num_receipts
        reached = await fleet.steadily(RECEIPTS_PER_POST, OFFERED_PER_S, steady_s)
        times = fleet.times
        await fleet.steadily(RECEIPTS_PER_POST, fastest / 2, steady_s / 2)
        half_times = fleet.times
        await child.ask_later("referee")
        refereed = await fleet.steadily(RECEIPTS_PER_POST, OFFERED_PER_S, steady_s)
        referee_times, num_shards = fleet.times, (await child.ask_later("rest"))["shards"]
        state = await child.ask_later("state")
    cpu_s = after["cpu_s"] - before["cpu_s"]
    return [
        floor(
            f"receipts/s of {NUM_MINERS} miners, {RECEIPTS_PER_POST} a post, as fast as it goes", fastest, 2000, unit=""
        ),
        fact(
            "CPU a post (signature, nonce, step, journal, acknowledgement)",
            f"{1e3 * cpu_s / num_posts:.2f} ms at the orchestrator, {1e3 * ours_s / num_posts:.2f} ms at the miners; "
            f"one core gives {num_receipts / cpu_s:,.0f} receipts/s",
        ),
        limit(
            f"p99 of a post at {OFFERED_PER_S} receipts/s offered, {reached:,.0f} taken",
            1e3 * percentile(times, 99),
            50,
            unit=" ms",
        ),
        fact("median", f"{1e3 * median(times):.1f} ms over {len(times)} posts"),
        fact(
            "at half of what is possible here",
            f"median {1e3 * median(half_times):.1f}, p99 {1e3 * percentile(half_times, 99):.1f} ms",
        ),
        fact(
            f"p99 at {OFFERED_PER_S} receipts/s while a referee recomputes shards of 16.7 MB, {refereed:,.0f} taken",
            f"{1e3 * percentile(referee_times, 99):.1f} ms, median {1e3 * median(referee_times):.1f} ms over "
            f"{len(referee_times)} posts; {num_shards} shards in {steady_s:g} s",
        ),
        fact("orchestrator", f"peak memory {state['peak_mb']:.0f} MB, {state['credited']:,} units credited"),
    ]


def bench(scale: float) -> list[Line]:
    """The machine alone, then the whole plane."""
    spare_what_is_loaded()
    config, fleet_keys = fleet_config(NUM_STAGES, NUM_MINERS), keys(NUM_MINERS)
    hotkeys = [key.hotkey for key in fleet_keys]
    lines = _machine_alone(config, hotkeys)
    with tempfile.TemporaryDirectory() as directory:
        child = Child(
            orchestrator_process, directory, hotkeys, encode_event(created(config, at_s=time.time())).decode()
        )
        with children(child):
            lines += run_loop(_measure(child, config, fleet_keys, scale))
    return lines
