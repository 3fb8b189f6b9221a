"""Stages with caches compute what the exported model computes, and a row's bits do not depend on its company."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from subnet.config import Bottleneck
from subnet.inference.cache import SequenceCache
from subnet.inference.decode import Span, StageRunner, frequencies, rows_are_independent
from subnet.inference.served import RopeScaling
from subnet.model.layers import rope_tables
from tests.unit.exported import all_params, moved_params, prompts, run_config, runners, write_model


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


Caches = list[list[SequenceCache]]


def new_caches(stages: Sequence[StageRunner], count: int) -> Caches:
    return [[SequenceCache(stage.cache_shape, 256) for stage in stages] for _ in range(count)]


def through(stages: Sequence[StageRunner], caches: Caches, spans: Sequence[tuple[int, int, list[int]]]) -> Tensor:
    """Logits of every row; a span is (sequence, start, ids)."""
    carried: Tensor | None = None
    for index, stage in enumerate(stages):
        carried = stage.run([Span(caches[seq][index], start, ids) for seq, start, ids in spans], carried)
    assert carried is not None
    return stages[-1].logits(carried)


def greedy(stages: Sequence[StageRunner], all_ids: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens of every sequence, all of them in one batch."""
    caches = new_caches(stages, len(all_ids))
    spans = [(seq, 0, ids) for seq, ids in enumerate(all_ids)]
    found: list[list[int]] = [[] for _ in all_ids]
    for _ in range(count):
        logits = through(stages, caches, spans)
        ends = torch.tensor([len(ids) for _, _, ids in spans]).cumsum(0) - 1
        tokens = logits[ends].argmax(-1).tolist()
        spans = [(seq, start + len(ids), [token]) for (seq, start, ids), token in zip(spans, tokens, strict=True)]
        for seq, token in enumerate(tokens):
            found[seq].append(token)
    return found


@pytest.mark.parametrize(("design", "num_stages"), [*((design, 3) for design in Bottleneck), (Bottleneck.NONE, 1)])
def test_greedy_tokens_are_those_of_generate(design: Bottleneck, num_stages: int, tmp_path: Path) -> None:
    config = run_config(design)
    vectors = moved_params(config)
    place = write_model(config, tmp_path / "model", vectors=vectors)
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=design is not Bottleneck.NONE)
    _, stages = runners(place, all_params(config, vectors), num_stages)
    asked = prompts(4)
    found = greedy(stages, asked, 12)
    for ids, tokens in zip(asked, found, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        assert tokens == expected
    assert len({tuple(tokens) for tokens in found}) > 2, "the text must matter, or this shows nothing"


@pytest.mark.parametrize("design", list(Bottleneck))
def test_a_row_has_the_same_bits_in_any_company_and_any_pieces(design: Bottleneck, tmp_path: Path) -> None:
    config = run_config(design)
    vectors = moved_params(config)
    _, stages = runners(write_model(config, tmp_path / "m", vectors=vectors), all_params(config, vectors), 3)
    asked = prompts(3, shortest=67, longest=72)
    ids = asked[0]
    (own,) = new_caches(stages, 1)
    alone = torch.cat([through(stages, [own], [(0, at, [token])]) for at, token in enumerate(ids)])
    together = through(stages, new_caches(stages, len(asked)), [(seq, 0, ids) for seq, ids in enumerate(asked)])
    assert torch.equal(alone, together[: len(ids)])
    caches = new_caches(stages, len(asked))
    for begin, end in ((0, 17), (17, 60), (60, 66)):
        chunk = through(stages, caches, [(seq, begin, ids[begin:end]) for seq, ids in enumerate(asked)])
        assert torch.equal(chunk[: end - begin], alone[begin:end])


@pytest.mark.parametrize("design", list(Bottleneck))
def test_the_check_at_the_start_passes_here(design: Bottleneck, tmp_path: Path) -> None:
    config = run_config(design)
    vectors = moved_params(config)
    _, stages = runners(write_model(config, tmp_path / "m", vectors=vectors), all_params(config, vectors), 3)
    assert all(rows_are_independent(stage) for stage in stages)


def test_with_a_fixed_number_of_rows_the_tokens_are_the_same(tmp_path: Path) -> None:
    config = run_config()
    vectors = moved_params(config)
    _, stages = runners(write_model(config, tmp_path / "m", vectors=vectors), all_params(config, vectors), 2)
    asked = prompts(3)
    free = greedy(stages, asked, 8)
    for stage in stages:
        stage.rows_at_once = 4
    assert greedy(stages, asked, 8) == free
    assert all(rows_are_independent(stage) for stage in stages)


class _Careless(StageRunner):
    """A stage whose rows hear of each other, as a library with other kernels could make them."""

    def run(self, spans: Sequence[Span], received_RK: Tensor | None) -> Tensor:
        return super().run(spans, received_RK) * (1 + 1e-6 * len(spans))


def test_the_check_at_the_start_sees_dependence(tmp_path: Path) -> None:
    config = run_config()
    vectors = moved_params(config)
    served, _ = runners(write_model(config, tmp_path / "m", vectors=vectors), all_params(config, vectors), 3)
    assert not rows_are_independent(_Careless(served, 1, 3, all_params(config, vectors), max_positions=64))


def test_positions_turn_as_in_training_and_as_in_llama_3() -> None:
    model = run_config().model
    angles = torch.arange(9, dtype=torch.float32)[:, None] * frequencies(model, None)
    assert torch.equal(torch.cat((angles, angles), -1).cos(), rope_tables(model, 9)[0])
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = RopeScaling(factor=8.0, low=1.0, high=4.0, original_positions=64)
    parameters = {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=parameters, max_position_embeddings=512)
    )
    assert torch.allclose(theirs.inv_freq, frequencies(model, scaling), rtol=1e-6)
    assert not torch.allclose(frequencies(model, None), frequencies(model, scaling))
