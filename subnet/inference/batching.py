"""Which sequences go into which step: continuous batching over a pipeline of stages, as a state machine without I/O.

Each step carries a micro-batch through all stages. As many steps are under way as there are stages, so that every stage has
work; each takes its share of the sequences that are ready. A sequence is ready again when its token has come back. Hosts are
named by their endpoint. A sequence keeps its route, for its caches are there; when a host of it is lost, the tokens so far
are sent again along a new one.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from subnet.errors import Backpressure
from subnet.inference.cache import TILE, padded
from subnet.inference.jobs import BatchLimits, Effect, End, Ended, Job, SendDrop, SendStep, Token
from subnet.inference.messages import Drop, Failed, Piece, Result, Step
from subnet.inference.sampling import Choice
from subnet.types import Endpoint


@dataclass(slots=True)
class _Sequence:
    job: Job
    since_s: float
    number: int = 0
    """On the wire; a new one for each attempt, so that late answers of an old one mean nothing."""
    ids: list[int] = field(default_factory=list)
    num_sent: int = 0
    route: tuple[Endpoint, ...] = ()
    """Empty while it waits for a place or, running, for room on another host."""
    attempts: int = 0
    homeless_s: float | None = None
    """Since when no hosts could hold it, were they empty."""

    @property
    def num_made(self) -> int:
        return len(self.ids) - len(self.job.prompt)

    @property
    def num_missing(self) -> int:
        return self.job.max_tokens - self.num_made

    @property
    def capacity(self) -> int:
        return len(self.job.prompt) + self.job.max_tokens


@dataclass(slots=True)
class _Flight:
    route: tuple[Endpoint, ...]
    numbers: tuple[int, ...]
    since_s: float


class Batcher:
    """The state machine of one gateway. Every method returns what is to be done, in order."""

    def __init__(self, session: str, num_stages: int, limits: BatchLimits) -> None:
        self.limits = limits
        self.num_stages = num_stages
        self._session = session
        self._hosts: dict[Endpoint, tuple[int, int]] = {}
        """Stage, and positions its caches may hold."""
        self._owed: dict[Endpoint, list[int]] = {}
        """What a lost host is to drop when it is back: a step may still be on its way there from the stage before."""
        self._waiting: OrderedDict[str, deque[_Sequence]] = OrderedDict()
        self._running: dict[int, _Sequence] = {}
        self._by_number: dict[int, _Sequence] = {}
        self._ready: OrderedDict[int, None] = OrderedDict()
        self._flights: dict[int, _Flight] = {}
        self._next_number = 1
        self._next_step = 1

    # ---- what a gateway shows ------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Sequences without a place."""
        return sum(len(line) for line in self._waiting.values())

    @property
    def num_running(self) -> int:
        """Sequences with one."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps under way."""
        return len(self._flights)

    def hosts_of(self, stage: int) -> list[Endpoint]:
        """Live hosts of a stage."""
        return [host for host, (own, _) in self._hosts.items() if own == stage]

    @property
    def is_whole(self) -> bool:
        """Whether every stage has a host."""
        return all(self.hosts_of(stage) for stage in range(self.num_stages))

    @property
    def max_capacity(self) -> int:
        """Positions that one sequence can have at most: the least of the stages' roomiest hosts; 0 while one has none."""
        roomiest = [
            max((self._hosts[host][1] for host in self.hosts_of(stage)), default=0) for stage in range(self.num_stages)
        ]
        return min(roomiest) // TILE * TILE

    # ---- requests ------------------------------------------------------------------------------------------------

    def submit(self, jobs: list[Job], now_s: float) -> list[Effect]:
        """Take all of a request's choices, or none. Raises Backpressure when too many wait."""
        if self.num_waiting + len(jobs) > self.limits.max_waiting:
            raise Backpressure(f"{self.num_waiting} sequences are waiting already; try again shortly")
        for job in jobs:
            line = self._waiting.setdefault(job.client, deque())
            line.append(_Sequence(job=job, since_s=now_s, ids=list(job.prompt)))
        return self._fill(now_s)

    def cancel(self, key: int, now_s: float, *, end: End = End.CANCELLED, detail: str = "") -> list[Effect]:
        """End a job at once, wherever it is; unknown ones are no error."""
        for client, line in list(self._waiting.items()):
            for sequence in line:
                if sequence.job.key == key:
                    line.remove(sequence)
                    self._forget_line(client)
                    return [Ended(key, end, detail)]
        running = self._running.get(key)
        return [] if running is None else [*self._finish(running, end, detail), *self._fill(now_s)]

    # ---- hosts ---------------------------------------------------------------------------------------------------

    def host_up(self, host: Endpoint, stage: int, limit_tokens: int, now_s: float) -> list[Effect]:
        """A host can take steps."""
        self._hosts[host] = (stage, limit_tokens)
        owed = self._owed.pop(host, [])
        drops: list[Effect] = [SendDrop(host, Drop(sequences=tuple(owed)))] if owed else []
        self._look_for_homes(now_s)
        return drops + self._fill(now_s)

    def host_down(self, host: Endpoint, now_s: float) -> list[Effect]:
        """A host is lost with its caches: what ran through it is sent again through others, or waits for one."""
        if self._hosts.pop(host, None) is None:
            return []
        effects: list[Effect] = []
        for step in [step for step, flight in self._flights.items() if host in flight.route]:
            del self._flights[step]
        for sequence in list(self._running.values()):
            if host in sequence.route:
                effects += self._send_again(sequence, f"host {host.host}:{host.port} is lost")
        self._look_for_homes(now_s)
        return effects + self._fill(now_s)

    def on_result(self, result: Result, now_s: float) -> list[Effect]:
        """A step has come through."""
        if self._flights.pop(result.step, None) is None:
            return self._fill(now_s)
        effects: list[Effect] = []
        for number, choice in result.choices:
            sequence = self._by_number.get(number)
            if sequence is not None:
                effects += self._take(sequence, choice)
        for number in result.lost:
            sequence = self._by_number.get(number)
            if sequence is not None:
                effects += self._send_again(sequence, "a host did not have its cache")
        return effects + self._fill(now_s)

    def on_failed(self, failed: Failed, now_s: float) -> list[Effect]:
        """A step has ended on its way. A host that is to blame is reported down by whoever notices; here only the step."""
        flight = self._flights.pop(failed.step, None)
        if flight is None:
            return self._fill(now_s)
        effects: list[Effect] = []
        for number in flight.numbers:
            sequence = self._by_number.get(number)
            if sequence is not None:
                effects += self._send_again(sequence, failed.reason)
        return effects + self._fill(now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Time limits: of requests, of steps, of waiting for a host."""
        limits = self.limits
        effects: list[Effect] = []
        for step in [step for step, flight in self._flights.items() if now_s - flight.since_s > limits.step_s]:
            effects += self.on_failed(
                Failed(step=step, reason=f"no answer to a step within {limits.step_s:g} s"), now_s
            )
        self._look_for_homes(now_s)
        for sequence in self._all():
            key, homeless_s = sequence.job.key, sequence.homeless_s
            if now_s - sequence.since_s > limits.request_s:
                effects += self.cancel(key, now_s, end=End.TIMEOUT)
            elif homeless_s is not None and now_s - homeless_s > limits.failover_s:
                detail = "no host holds that many tokens" if self.is_whole else "a stage of the model has no host"
                effects += self.cancel(key, now_s, end=End.UNAVAILABLE, detail=detail)
        return effects + self._fill(now_s)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _all(self) -> list[_Sequence]:
        """Waiting, then running."""
        return [*(sequence for line in self._waiting.values() for sequence in line), *self._running.values()]

    def _look_for_homes(self, now_s: float) -> None:
        """Note who could be held by no hosts, and since when. Who only waits for room has a home."""
        most = self.max_capacity
        for sequence in self._all():
            if sequence.route or sequence.capacity <= most:
                sequence.homeless_s = None
            elif sequence.homeless_s is None:
                sequence.homeless_s = now_s

    def _take(self, sequence: _Sequence, choice: Choice) -> list[Effect]:
        key, job = sequence.job.key, sequence.job
        if choice.token in job.stop_ids:
            return self._finish(sequence, End.STOP)
        sequence.ids.append(choice.token)
        if sequence.num_made >= job.max_tokens:
            return [Token(key, choice), *self._finish(sequence, End.LENGTH)]
        self._ready[key] = None
        return [Token(key, choice)]

    def _finish(self, sequence: _Sequence, end: End, detail: str = "") -> list[Effect]:
        key = sequence.job.key
        self._running.pop(key, None)
        self._ready.pop(key, None)
        return [*self._drop(sequence), Ended(key, end, detail)]

    def _drop(self, sequence: _Sequence) -> list[Effect]:
        """Free the caches of the attempt at hand, on every host that is still there."""
        if self._by_number.pop(sequence.number, None) is None:
            return []
        drop = Drop(sequences=(sequence.number,))
        for host in sequence.route:
            if host not in self._hosts:
                self._owed.setdefault(host, []).append(sequence.number)
        return [SendDrop(host, drop) for host in sequence.route if host in self._hosts]

    def _send_again(self, sequence: _Sequence, reason: str) -> list[Effect]:
        effects = self._drop(sequence)
        sequence.attempts += 1
        self._ready.pop(sequence.job.key, None)
        if sequence.attempts > self.limits.max_attempts:
            return effects + self._finish(sequence, End.UNAVAILABLE, reason)
        sequence.num_sent = 0
        self._place(sequence)
        return effects

    def _place(self, sequence: _Sequence) -> None:
        """Give it a route, or let it wait for one."""
        sequence.route = self._route(sequence) or ()
        if not sequence.route:
            return
        sequence.number, self._next_number = self._next_number, self._next_number + 1
        self._by_number[sequence.number] = sequence
        self._ready[sequence.job.key] = None

    def _route(self, sequence: _Sequence) -> tuple[Endpoint, ...] | None:
        """For each stage the host with most room, when each has room for the whole sequence."""
        held: dict[Endpoint, int] = dict.fromkeys(self._hosts, 0)
        for other in self._by_number.values():
            for host in other.route:
                if host in held:
                    held[host] += padded(other.capacity)
        route = []
        for stage in range(self.num_stages):
            rooms = {host: self._hosts[host][1] - held[host] for host in self.hosts_of(stage)}
            fitting = [host for host, room in rooms.items() if room >= padded(sequence.capacity)]
            if not fitting:
                return None
            route.append(max(fitting, key=lambda host: rooms[host]))
        return tuple(route)

    def _fill(self, now_s: float) -> list[Effect]:
        """Places for those who wait, then steps for those who are ready."""
        for sequence in [sequence for sequence in self._running.values() if not sequence.route]:
            self._place(sequence)
        self._admit()
        effects: list[Effect] = []
        while (step := self._next(now_s)) is not None:
            effects.append(step)
        return effects

    def _admit(self) -> None:
        """One client after the other, each in order; who does not fit yet lets nobody pass, so that nobody waits for ever."""
        if not all(sequence.route for sequence in self._running.values()):
            return  # who lost a host comes before newcomers
        while self._waiting and self.num_running < self.limits.max_running:
            client = next(iter(self._waiting))
            sequence = self._waiting[client][0]
            if self._route(sequence) is None:
                return
            self._waiting[client].popleft()
            self._waiting.move_to_end(client)
            self._forget_line(client)
            self._running[sequence.job.key] = sequence
            self._place(sequence)

    def _forget_line(self, client: str) -> None:
        if not self._waiting[client]:
            del self._waiting[client]

    def _next(self, now_s: float) -> SendStep | None:
        """The next step of the route whose turn it is: that of the sequence that is ready longest."""
        for key in self._ready:
            route = self._running[key].route
            if sum(flight.route == route for flight in self._flights.values()) < self.num_stages:
                return self._make(route, now_s)
        return None

    def _make(self, route: tuple[Endpoint, ...], now_s: float) -> SendStep:
        mates = sum(sequence.route == route for sequence in self._running.values())
        share, room = -(-mates // self.num_stages), self.limits.max_rows
        pieces: list[Piece] = []
        for key in [key for key in self._ready if self._running[key].route == route][:share]:
            sequence = self._running[key]
            if room == 0:
                break
            ids = tuple(sequence.ids[sequence.num_sent : sequence.num_sent + room])
            start = sequence.num_sent
            sequence.num_sent, room = start + len(ids), room - len(ids)
            is_whole = sequence.num_sent == len(sequence.ids)
            pieces.append(
                Piece(
                    sequence=sequence.number,
                    start=start,
                    ids=ids,
                    capacity=sequence.capacity,
                    num_targets=min(sequence.job.num_at_once, sequence.num_missing) if is_whole else 0,
                    noise_seed=sequence.job.sampling.seed,
                    sampling=sequence.job.sampling if is_whole else None,
                )
            )
            if is_whole:
                del self._ready[key]
            else:
                self._ready.move_to_end(key)
        number, self._next_step = self._next_step, self._next_step + 1
        self._flights[number] = _Flight(route, tuple(piece.sequence for piece in pieces), now_s)
        step = Step(session=self._session, step=number, pieces=tuple(pieces), route=route[1:])
        return SendStep(route[0], step)
