"""Pooled stages that serve: the composed stack's logits, greedy tokens of transformers, and bits of their own for every row."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from subnet.config import Objective, RunConfig
from subnet.inference.cache import SequenceCache
from subnet.inference.decode import Span, rows_are_independent
from subnet.inference.engine import Item, PooledEngine, make_engine, mode_of
from subnet.inference.messages import Piece
from subnet.inference.pooled import PooledRunner
from subnet.inference.sampling import Sampling
from subnet.inference.served import ServedModel, read_config
from subnet.inference.sweep import PredictingStack
from tests.unit.exported import Vectors, all_params, blocktrain_config, moved_params, prompts, write_model

CONFIG = blocktrain_config(Objective.POOLED, num_stages=4)
"""Six layers: stages of one layer and of two."""
SERVED = ServedModel(run=CONFIG, has_cuts=True, dtype="float32", max_positions=64)


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return moved_params(CONFIG)


def runners(vectors: Vectors, num_hosts: int, config: RunConfig = CONFIG) -> list[PooledRunner]:
    params = all_params(config, vectors)
    return [PooledRunner(SERVED, stage, num_hosts, params, max_positions=256) for stage in range(num_hosts)]


class Serving:
    """Every host with its caches."""

    def __init__(self, hosts: Sequence[PooledRunner], count: int) -> None:
        self.hosts = hosts
        self.caches = [[SequenceCache(host.cache_shape, 128) for host in hosts] for _ in range(count)]

    def logits(self, asked: Sequence[tuple[int, int, list[int]]], wanted: Sequence[int] | None = None) -> Tensor:
        """Of the wanted rows, or of all; an entry is (sequence, start, ids)."""
        rows = range(sum(len(ids) for _, _, ids in asked)) if wanted is None else wanted
        sums: Tensor | None = None
        for index, host in enumerate(self.hosts):
            spans = [Span(self.caches[seq][index], start, ids) for seq, start, ids in asked]
            sums = host.add(sums, host.own(spans, rows))
        assert sums is not None
        return self.hosts[-1].mean(sums)


def test_together_they_say_what_the_evaluation_says(vectors: Vectors) -> None:
    ids = prompts(1, shortest=40, longest=41)[0]
    with torch.no_grad():
        *_, expected = PredictingStack(CONFIG, vectors).logits(torch.tensor([ids]))
    assert torch.allclose(Serving(runners(vectors, 4), 1).logits([(0, 0, ids)]), expected[0], atol=2e-5)


@pytest.mark.parametrize("num_hosts", [1, 2, 3])
def test_how_stages_are_dealt_out_to_hosts_changes_no_bit(num_hosts: int, vectors: Vectors) -> None:
    ids = prompts(1, shortest=70, longest=71)[0]
    each_alone = Serving(runners(vectors, 4), 1).logits([(0, 0, ids)])
    assert torch.equal(Serving(runners(vectors, num_hosts), 1).logits([(0, 0, ids)]), each_alone)


def test_company_and_pieces_change_no_bit(vectors: Vectors) -> None:
    hosts = runners(vectors, 3)
    asked = prompts(3, shortest=67, longest=72)
    ids = asked[0]
    own = Serving(hosts, 1)
    alone = torch.cat([own.logits([(0, at, [token])]) for at, token in enumerate(ids)])
    together = Serving(hosts, 3).logits([(seq, 0, ids) for seq, ids in enumerate(asked)])
    assert torch.equal(together[: len(ids)], alone)
    pieces = Serving(hosts, 1)
    assert pieces.logits([(0, 0, ids[:30])], wanted=[]).shape == (0, 256)
    assert torch.equal(pieces.logits([(0, 30, ids[30:])], wanted=[len(ids) - 31]), alone[-1:])
    assert all(rows_are_independent(runner) for host in hosts for runner in host.runners)


def test_greedy_tokens_are_those_of_generate(vectors: Vectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = AutoModelForCausalLM.from_pretrained(write_model(CONFIG, tmp_path / "m"), trust_remote_code=True)
    found = []
    for ids in prompts(4):
        serving, tokens, start, new = Serving(runners(vectors, 3), 1), [], 0, ids
        for _ in range(12):
            tokens.append(int(serving.logits([(0, start, new)], wanted=[len(new) - 1]).argmax()))
            start, new = start + len(new), tokens[-1:]
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert tokens == expected
        found.append(tuple(tokens))
    assert len(set(found)) > 2, "the text must matter, or this shows nothing"


def test_a_row_crosses_for_each_token_that_is_wanted(vectors: Vectors) -> None:
    engine, _ = make_engine(SERVED, 1, 4, all_params(CONFIG, vectors), max_positions=64)
    asks = Piece(sequence=1, start=0, ids=(1, 2, 3), capacity=9, sampling=Sampling(temperature=0))
    reads = Piece(sequence=2, start=0, ids=(4, 5), capacity=9)
    assert [engine.num_rows(piece) for piece in (asks, reads)] == [1, 0]
    items = [(piece, SequenceCache(engine.cache_shape, 9)) for piece in (reads, asks)]
    rows, choices = engine.run(items, torch.zeros(1, SERVED.wire_width))
    assert rows is not None and rows.shape == (1, 256) and not choices


@pytest.mark.parametrize("stage", [1, 2])
def test_what_was_computed_ahead_has_the_same_bits_also_when_only_some_of_it_is_wanted(
    vectors: Vectors, stage: int
) -> None:
    """Three hosts, the last with two stages; between the two looks the stage before lost one sequence and one came anew."""
    engine, _ = make_engine(SERVED, stage, 3, all_params(CONFIG, vectors), max_positions=64)
    assert isinstance(engine, PooledEngine)
    pieces = [
        Piece(sequence=1, start=0, ids=(1, 2, 3), capacity=9, sampling=Sampling(temperature=0)),
        Piece(sequence=2, start=0, ids=(4, 5), capacity=9),
        Piece(sequence=3, start=0, ids=(7, 6), capacity=9, sampling=Sampling(temperature=0)),
        Piece(sequence=4, start=0, ids=(8, 9), capacity=9, sampling=Sampling(temperature=0, num_logprobs=5)),
    ]

    def opened() -> list[Item]:
        return [(piece, SequenceCache(engine.cache_shape, 9)) for piece in pieces]

    received = torch.randn(2, SERVED.wire_width, generator=torch.Generator().manual_seed(3))
    plain, plainly_chosen = engine.run(opened()[1:], received)
    items = opened()
    ahead = engine.ahead(items[:3])
    rows, chosen = engine.run(items[1:], received, ahead)
    assert chosen == plainly_chosen
    assert (rows is None and plain is None) or (rows is not None and plain is not None and torch.equal(rows, plain))
    assert bool(chosen) == engine.is_last


def test_the_exported_directory_says_how_it_is_served(tmp_path: Path) -> None:
    place = write_model(CONFIG, tmp_path / "m")
    served = read_config((place / "config.json").read_bytes())
    assert (mode_of(served), served.max_stages, served.wire_width, served.wire_dtype) == ("pooled", 4, 256, "float32")
    assert [served.num_layers(stage, 3) for stage in range(3)] == [1, 2, 3]
    names = {name for stage in range(3) for name, _ in served.tensor_names(stage, 3).values()}
    assert names == set(all_params(CONFIG, moved_params(CONFIG)))
