"""A run as a Hugging Face directory: transformers loads it and computes the same."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from neurons.export import write_directory
from neurons.published import Published
from subnet.config import Bottleneck, CorpusConfig, Objective, RunConfig
from subnet.errors import InvalidConfig
from subnet.inference.sweep import PredictingStack
from subnet.model import export
from subnet.model.flat import unflatten
from subnet.model.init import initial_params
from subnet.model.partition import param_shapes
from subnet.model.payload import as_sent
from subnet.model.stage import build_stage
from subnet.training.outer import encode_snapshot
from subnet.types import Epoch, SampleId, StageIndex
from tests.numerics.support import PatternCorpus, small_config
from tests.unit.exported import blocktrain_config, moved_params

ANCHORED = {
    **{str(design): small_config(design) for design in Bottleneck},
    "resbm, no ids": small_config(Bottleneck.RESBM, anchor_ids=False),
    "iota, no ids": small_config(Bottleneck.IOTA, anchor_ids=False),
    "iota, one layer a stage": small_config(Bottleneck.IOTA, num_layers=3),
}
PLAIN = {
    "uncut": small_config(Bottleneck.NONE, anchor_ids=False),
    "one stage": small_config(Bottleneck.RESBM, num_stages=1),
}


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that comes with a model is copied before it is imported; not into the home directory."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def trained(config: RunConfig) -> list[Any]:
    """Params that are no longer at their first values, norms included."""
    draw = np.random.default_rng(0)
    vectors = [initial_params(config, StageIndex(stage)) for stage in range(config.training.num_stages)]
    return [vector + draw.normal(0, 0.02, vector.shape).astype(np.float32) for vector in vectors]


def exported(config: RunConfig, vectors: list[Any], place: Path) -> Path:
    published = Published(run_id="run", config=config, corpus_digest="", epoch=Epoch(3), snapshots=())
    write_directory(published, [encode_snapshot(vector, np.zeros_like(vector)) for vector in vectors], place)
    return place


def logits_of_run(config: RunConfig, vectors: list[Any], tokens: torch.Tensor) -> torch.Tensor:
    """What the last stage computes its loss from."""
    carried: torch.Tensor | None = None
    with torch.no_grad():
        for index, vector in enumerate(vectors):
            stage = StageIndex(index)
            module, params = build_stage(config, stage), unflatten(vector, param_shapes(config, stage))
            if index < len(vectors) - 1:
                carried = as_sent(config, functional_call(module, params, (carried, tokens)))
                continue
            module.loss = lambda stream, _targets, own=module: own.lm_head(own.model.norm(stream))  # type: ignore[method-assign,misc]
            carried = functional_call(module, params, (carried, tokens))
    assert carried is not None
    return carried


@pytest.mark.parametrize("name", [*ANCHORED, *PLAIN])
def test_logits_are_equal_to_the_bit_when_loaded_back(name: str, tmp_path: Path) -> None:
    config = (ANCHORED | PLAIN)[name]
    vectors = trained(config)
    model = AutoModelForCausalLM.from_pretrained(
        exported(config, vectors, tmp_path / "model"), trust_remote_code=name in ANCHORED
    )
    tokens = torch.from_numpy(PatternCorpus(config).tokens(Epoch(0), SampleId(0)))
    with torch.no_grad():
        found = model(tokens[:, :-1]).logits
    assert torch.equal(found, logits_of_run(config, vectors, tokens))
    assert isinstance(model, LlamaForCausalLM) == (name in PLAIN)


@pytest.mark.parametrize("name", ["resbm", "iota", "none", "k0"])
def test_generate_uses_its_cache(name: str, tmp_path: Path) -> None:
    config = ANCHORED[name]
    model = AutoModelForCausalLM.from_pretrained(
        exported(config, trained(config), tmp_path / "model"), trust_remote_code=True
    )
    ids = torch.from_numpy(PatternCorpus(config).heldout(0)[:1, :8])
    again = ids
    with torch.no_grad():
        for _ in range(12):
            again = torch.cat([again, model(again).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(model.generate(ids, max_new_tokens=12), again)
        half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True, dtype=torch.bfloat16)
        assert torch.allclose(half(ids).logits.float(), model(ids).logits, atol=0.05)


def test_large_params_are_sharded_and_load_the_same(tmp_path: Path) -> None:
    config = ANCHORED["resbm"]
    vectors = trained(config)
    place = exported(config, vectors, tmp_path / "model")
    whole = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).state_dict()
    (place / "model.safetensors").unlink()
    files = dict(export.param_files(config, vectors, shard_limit_bytes=64_000))
    for file, data in files.items():
        (place / file).write_bytes(data)
    index = json.loads(files["model.safetensors.index.json"])
    assert len(files) > 3
    assert set(index["weight_map"].values()) == set(files) - {"model.safetensors.index.json"}
    assert all(len(data) < 80_000 for data in files.values())
    sharded = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).state_dict()
    assert all(torch.equal(sharded[key], tensor) for key, tensor in whole.items())


def test_transformers_reads_the_tokenizer(tmp_path: Path) -> None:
    config = PLAIN["uncut"]
    tokenizer = AutoTokenizer.from_pretrained(exported(config, trained(config), tmp_path / "model"))
    text = "Grüße, 世界!\n\t\0 \U0001f600 a b"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    tokenizer = export.byte_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_where_it_came_from_stands_beside_it(tmp_path: Path) -> None:
    config = ANCHORED["resbm"]
    place = exported(config, trained(config), tmp_path / "model")
    said = json.loads((place / "strata.json").read_text())
    assert (said["run_id"], said["epoch"]) == ("run", 3)
    assert msgspec.convert(said["run_config"], RunConfig) == config


@pytest.mark.parametrize("depth", [None, 1, 2])
def test_stages_that_predict_apart_are_a_plain_llama_at_any_depth(depth: int | None, tmp_path: Path) -> None:
    config = blocktrain_config(Objective.GREEDY)
    vectors = moved_params(config)
    published = Published(run_id="run", config=config, corpus_digest="", epoch=Epoch(3), snapshots=())
    snapshots = [encode_snapshot(vector, np.zeros_like(vector)) for vector in vectors]
    write_directory(published, snapshots, tmp_path / "model", depth=depth)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        expected = list(PredictingStack(config, vectors).logits(ids))[(depth or 3) - 1]
        assert torch.equal(model(ids).logits, expected)
    assert isinstance(model, LlamaForCausalLM)


@pytest.mark.parametrize("num_stages", [1, 3, 4])
def test_pooled_stages_load_as_a_class_with_the_logits_of_the_evaluation(num_stages: int, tmp_path: Path) -> None:
    """Six layers in four stages do not divide: the later ones hold one more."""
    config = blocktrain_config(Objective.POOLED, num_stages=num_stages)
    vectors = moved_params(config)
    place = exported(config, vectors, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        *_, expected = PredictingStack(config, vectors).logits(ids)
        assert torch.equal(model(ids).logits, expected)
        # eight rows of logits: a row's bits are its own in products of a multiple of four rows, with any number of threads (D60)
        assert torch.equal(model(ids, logits_to_keep=4).logits, expected[:, -4:])
        again = ids[:1]
        for _ in range(12):
            again = torch.cat([again, model(again).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(model.generate(ids[:1], max_new_tokens=12), again)


def test_stages_that_denoise_have_a_file_each(tmp_path: Path) -> None:
    config = blocktrain_config(Objective.DIFFUSION)
    files = dict(export.param_files(config, moved_params(config)))
    index = json.loads(files["model.safetensors.index.json"])["weight_map"]
    assert len(files) == 4
    assert len({index[name] for name in index if name.startswith("blocks.1.")}) == 1
    for other in (config, blocktrain_config(Objective.POOLED)):
        with pytest.raises(InvalidConfig, match="stages of the objective greedy"):
            export.stages_of(other, 1)
    with pytest.raises(InvalidConfig, match=r"--depth must be in \[1, 3\]"):
        export.stages_of(blocktrain_config(Objective.GREEDY), 4)


def test_an_unknown_tokenizer_is_refused() -> None:
    config = msgspec.structs.replace(PLAIN["uncut"], corpus=CorpusConfig(tokenizer="bpe"))
    with pytest.raises(InvalidConfig, match="no tokenizer file"):
        export.tokenizer_files(config)
