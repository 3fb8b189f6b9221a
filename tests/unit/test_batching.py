"""The batcher against a pipeline that exists in this file only: fills it, is fair, loses nothing, forgets nothing."""

from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.errors import Backpressure
from subnet.inference.batching import Batcher
from subnet.inference.cache import padded
from subnet.inference.jobs import BatchLimits, Effect, End, Ended, Job, SendDrop, SendStep, Token
from subnet.inference.messages import Failed, Piece, Result, Step
from subnet.inference.sampling import Choice, Sampling
from subnet.types import Endpoint

NUM_STAGES = 3


def endpoint(stage: int, replica: int = 0) -> Endpoint:
    return Endpoint(host="h", port=100 * stage + replica + 1)


def job(key: int, *, client: str = "a", length: int = 5, max_tokens: int = 4) -> Job:
    prompt = tuple((key * 31 + at) % 97 for at in range(length))
    return Job(key=key, client=client, prompt=prompt, max_tokens=max_tokens, sampling=Sampling())


def next_token(ids: Iterable[int]) -> int:
    """The model: any function of the whole text."""
    return hash(tuple(ids)) % 997


class World:
    """Hosts that remember texts, steps on their way between them, and what the client got."""

    def __init__(self, limits: BatchLimits | None = None, replicas: int = 1, room: int = 1 << 20) -> None:
        self.batcher = Batcher("s", NUM_STAGES, limits or BatchLimits())
        self.texts: dict[Endpoint, dict[int, list[int]]] = {}
        self.dropped: set[tuple[Endpoint, int]] = set()
        """What hosts refuse when it comes late, as cache.CacheBook does."""
        self.flying: deque[tuple[SendStep, list[Endpoint]]] = deque()
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, End] = {}
        self.started: list[int] = []
        self.most_in_flight = 0
        self.now_s = 0.0
        for stage in range(NUM_STAGES):
            for replica in range(replicas):
                self.up(endpoint(stage, replica), room)

    def up(self, host: Endpoint, room: int = 1 << 20) -> None:
        self.texts[host] = {}
        self.do(self.batcher.host_up(host, host.port // 100, room, self.now_s))

    def down(self, host: Endpoint) -> None:
        del self.texts[host]
        self.do(self.batcher.host_down(host, self.now_s))

    def submit(self, *jobs: Job) -> None:
        self.do(self.batcher.submit(list(jobs), self.now_s))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendStep(host, step):
                    self.flying.append((effect, [host, *step.route]))
                case SendDrop(host, drop):
                    for number in drop.sequences:
                        self.texts[host].pop(number, None)
                        self.dropped.add((host, number))
                case Token(key, choice):
                    self.tokens.setdefault(key, []).append(choice.token)
                case Ended(key, end):
                    assert key not in self.ends, "a job ends once"
                    self.ends[key] = end
        self.most_in_flight = max(self.most_in_flight, self.batcher.num_in_flight)

    def deliver(self) -> None:
        """The oldest step passes every host of its route."""
        sent, route = self.flying.popleft()
        pieces, lost = list(sent.step.pieces), []
        for host in route:
            if host not in self.texts:
                self.do(self.batcher.on_failed(Failed(step=sent.step.step, reason="gone", at=host), self.now_s))
                return
            kept = []
            for piece in pieces:
                if piece.start == 0 and (host, piece.sequence) not in self.dropped:
                    self.texts[host][piece.sequence] = []
                text = self.texts[host].get(piece.sequence)
                if text is None:
                    lost.append(piece.sequence)
                    continue
                assert len(text) == piece.start, "rows of a sequence come in order"
                text.extend(piece.ids)
                kept.append(piece)
            pieces = kept
        self.do(self.batcher.on_result(self._answer(sent.step, pieces, route[-1], lost), self.now_s))

    def _answer(self, step: Step, pieces: list[Piece], last: Endpoint, lost: list[int]) -> Result:
        choices = [
            (piece.sequence, Choice(token=next_token(self.texts[last][piece.sequence]), logprob=0.0))
            for piece in pieces
            if piece.sampling is not None
        ]
        return Result(step=step.step, choices=tuple(choices), lost=tuple(lost))

    def run(self) -> None:
        while self.flying:
            self.deliver()

    def assert_empty(self) -> None:
        assert not any(self.texts.values()), "caches are left on a host"
        assert (self.batcher.num_waiting, self.batcher.num_running, self.batcher.num_in_flight) == (0, 0, 0)


def expected(asked: Job) -> list[int]:
    ids = list(asked.prompt)
    for _ in range(asked.max_tokens):
        ids.append(next_token(ids))
    return ids[len(asked.prompt) :]


def test_every_stage_has_work_and_tokens_are_those_of_each_text_alone() -> None:
    world = World()
    jobs = [job(key, length=3 + key, max_tokens=6) for key in range(12)]
    world.submit(*jobs)
    assert world.batcher.num_in_flight == NUM_STAGES
    assert sorted(len(sent.step.pieces) for sent, _ in world.flying) == [4, 4, 4]
    world.run()
    assert world.tokens == {asked.key: expected(asked) for asked in jobs}
    assert set(world.ends.values()) == {End.LENGTH}
    assert world.most_in_flight == NUM_STAGES
    world.assert_empty()


def test_a_long_prompt_is_read_in_parts_that_follow_each_other_without_waiting() -> None:
    world = World(BatchLimits(max_rows=8))
    asked = job(1, length=20, max_tokens=2)
    world.submit(asked)
    rows = [
        [(piece.start, len(piece.ids), piece.sampling is None) for piece in sent.step.pieces]
        for sent, _ in world.flying
    ]
    assert rows == [[(0, 8, True)], [(8, 8, True)], [(16, 4, False)]]
    world.run()
    assert world.tokens[1] == expected(asked)
    world.assert_empty()


def test_a_sweep_brings_all_tokens_in_one_step() -> None:
    world = World()
    asked = Job(key=1, client="a", prompt=(1, 2, 3), max_tokens=6, sampling=Sampling(), num_at_once=6)
    world.submit(asked)
    (sent, route), *_ = world.flying
    assert [(piece.ids, piece.num_targets) for piece in sent.step.pieces] == [((1, 2, 3), 6)]
    for host in route:
        world.texts[host][1] = [1, 2, 3]
    choices = tuple((1, Choice(token=token, logprob=0.0)) for token in range(10, 16))
    world.do(world.batcher.on_result(Result(step=sent.step.step, choices=choices), 0.0))
    assert world.tokens == {1: [10, 11, 12, 13, 14, 15]}
    assert world.ends == {1: End.LENGTH}
    world.assert_empty()


def test_a_stop_token_is_not_handed_out() -> None:
    world = World()
    asked = job(1)
    ends_at = expected(asked)[2]
    stops = Job(key=1, client="a", prompt=asked.prompt, max_tokens=4, sampling=Sampling(), stop_ids=(ends_at,))
    world.submit(stops)
    world.run()
    assert world.tokens[1] == expected(asked)[:2]
    assert world.ends == {1: End.STOP}


def test_places_go_round_the_clients() -> None:
    world = World(BatchLimits(max_running=1))
    world.submit(*(job(key, client="many") for key in range(6)))
    world.submit(job(10, client="one"), job(11, client="one"))
    world.submit(job(20, client="two"))
    order: list[int] = []
    while world.flying:
        world.deliver()
        order += [key for key in world.ends if key not in order]
    assert order == [0, 1, 10, 20, 2, 11, 3, 4, 5]


def test_too_many_are_turned_away_whole() -> None:
    world = World(BatchLimits(max_waiting=3, max_running=2))
    world.submit(job(0), job(1), job(2))
    world.submit(job(3), job(4))
    with pytest.raises(Backpressure, match="3 sequences are waiting"):
        world.submit(job(5))
    world.run()
    assert sorted(world.ends) == [0, 1, 2, 3, 4]
    world.assert_empty()


def test_caches_are_never_promised_twice() -> None:
    world = World(room=2 * padded(9))
    world.submit(*(job(key) for key in range(5)))
    assert world.batcher.max_capacity == 2 * padded(9)
    assert (world.batcher.num_running, world.batcher.num_waiting) == (2, 3)
    world.run()
    assert len(world.ends) == 5


def test_a_lost_host_is_replaced_and_the_text_goes_on() -> None:
    world = World(replicas=2)
    jobs = [job(key, max_tokens=8) for key in range(6)]
    world.submit(*jobs)
    for _ in range(7):
        world.deliver()
    world.down(endpoint(1, 0))
    world.run()
    assert world.tokens == {asked.key: expected(asked) for asked in jobs}
    world.assert_empty()


def test_without_a_replica_the_end_is_clear_and_bounded() -> None:
    world = World(BatchLimits(failover_s=5, max_running=2))
    world.submit(job(1), job(2), job(3))
    world.deliver()
    world.down(endpoint(2))
    world.run()
    world.now_s = 4.9
    world.do(world.batcher.tick(world.now_s))
    assert not world.ends
    world.now_s = 10.0
    world.do(world.batcher.tick(world.now_s))
    assert world.ends == {1: End.UNAVAILABLE, 2: End.UNAVAILABLE, 3: End.UNAVAILABLE}
    assert not world.batcher.is_whole
    world.assert_empty()


def test_who_waits_for_room_on_a_replica_is_not_given_up_nor_passed() -> None:
    """Two replicas that are full; what ran on the lost one waits until something on the other has ended."""
    world = World(BatchLimits(failover_s=5), replicas=2, room=2 * padded(9))
    world.submit(*(job(key) for key in range(4)))
    world.down(endpoint(1, 0))
    world.submit(job(4))
    for world.now_s in (1.0, 7.0):
        world.do(world.batcher.tick(world.now_s))
    assert not world.ends
    assert (world.batcher.num_running, world.batcher.num_waiting) == (4, 1)
    world.run()
    assert {key: end for key, end in world.ends.items() if end is not End.LENGTH} == {}
    assert max(world.ends, key=list(world.ends).index) == 4
    world.assert_empty()


def test_who_fits_no_host_ends_soon_and_lets_the_others_pass() -> None:
    """The roomy host was lost after it had been asked for."""
    world = World(BatchLimits(failover_s=5, max_running=1), room=padded(9))
    world.up(endpoint(0, 1), 4 * padded(9))
    world.up(endpoint(1, 1), 4 * padded(9))
    world.up(endpoint(2, 1), 4 * padded(9))
    world.submit(job(1), job(2, length=3 * padded(9)), job(3))
    world.down(endpoint(1, 1))
    world.run()
    assert world.batcher.num_waiting == 2
    for world.now_s in (1.0, 7.0):
        world.do(world.batcher.tick(world.now_s))
    world.run()
    assert world.ends == {1: End.LENGTH, 2: End.UNAVAILABLE, 3: End.LENGTH}
    world.assert_empty()


def test_a_host_that_comes_back_in_time_takes_over() -> None:
    world = World(BatchLimits(failover_s=5))
    asked = job(1, max_tokens=6)
    world.submit(asked)
    world.deliver()
    world.down(endpoint(2))
    world.run()
    world.up(endpoint(2))
    world.run()
    assert world.tokens[1] == expected(asked)
    world.assert_empty()


def test_limits_of_time() -> None:
    world = World(BatchLimits(step_s=5, request_s=20, max_attempts=1, max_running=1))
    world.submit(job(1), job(2))
    world.flying.clear()
    world.do(world.batcher.tick(6.0))
    assert world.batcher.num_in_flight == 1
    world.flying.clear()
    world.do(world.batcher.tick(12.0))
    assert world.ends == {1: End.UNAVAILABLE}
    world.flying.clear()
    world.do(world.batcher.tick(21.0))
    assert world.ends[2] is End.TIMEOUT
    world.do(world.batcher.cancel(7, 21.0))


EVENTS = st.lists(
    st.tuples(st.sampled_from(["submit", "deliver", "deliver", "deliver", "cancel", "down", "up"]), st.integers(0, 11)),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_nothing_is_lost_and_nothing_is_left(events: list[tuple[str, int]]) -> None:
    world = World(
        BatchLimits(max_rows=7, max_running=5, max_attempts=100, failover_s=1), replicas=2, room=4 * padded(13)
    )
    jobs: dict[int, Job] = {}
    for at, (kind, number) in enumerate(events):
        host = endpoint(number % NUM_STAGES, number // NUM_STAGES % 2)
        if kind == "submit":
            jobs[at] = job(at, client=str(number % 3), length=1 + number, max_tokens=2)
            world.submit(jobs[at])
        elif kind == "deliver" and world.flying:
            world.deliver()
        elif kind == "cancel" and jobs:
            world.do(world.batcher.cancel(sorted(jobs)[number % len(jobs)], 0.0))
        elif kind == "down" and host in world.texts:
            world.down(host)
        elif kind == "up" and host not in world.texts:
            world.up(host, 4 * padded(13))
    for stage in range(NUM_STAGES):
        if endpoint(stage) not in world.texts:
            world.up(endpoint(stage), 4 * padded(13))
    world.run()
    assert sorted(world.ends) == sorted(jobs)
    for key, asked in jobs.items():
        made = world.tokens.get(key, [])
        assert made == expected(asked)[: len(made)]
        assert world.ends[key] is End.CANCELLED or made == expected(asked)
    world.assert_empty()
