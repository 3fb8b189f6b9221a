"""Model directories of this project and of Hugging Face, read tensor by tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from neurons.serving.options import ServeOptions, check_key, read_options
from subnet.adapters.model_files import ModelDirectory, total_bytes
from subnet.config import Bottleneck, Objective
from subnet.errors import InvalidConfig
from subnet.inference.cache import SequenceCache
from subnet.inference.decode import Span, StageRunner, torch_dtype
from subnet.inference.served import read_config
from subnet.model.export import byte_tokenizer
from subnet.types import Endpoint
from tests.unit.exported import blocktrain_config, run_config, write_model


def llama(place: Path, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random Llama as save_pretrained writes it."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        **changes,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).eval()
    model.save_pretrained(place, max_shard_size="100kB")
    (place / "tokenizer.json").write_text(byte_tokenizer().to_str())
    return model


def stage_runners(directory: ModelDirectory, num_stages: int) -> list[StageRunner]:
    served = directory.served
    return [
        StageRunner(
            served,
            stage,
            num_stages,
            directory.tensors(served.tensor_names(stage, num_stages), torch_dtype(served.dtype)),
            max_positions=64,
        )
        for stage in range(num_stages)
    ]


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"dtype": torch.bfloat16}])
def test_any_llama_is_cut_as_it_is_read(changes: dict[str, Any], tmp_path: Path) -> None:
    model = llama(tmp_path, **changes)
    directory = ModelDirectory(tmp_path)
    ids = list(range(40, 60))
    rows = None
    stages = stage_runners(directory, 3)
    for stage in stages:
        rows = stage.run([Span(SequenceCache(stage.cache_shape, 64), 0, ids)], rows)
    assert rows is not None
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float()
        exact = model.float()(torch.tensor([ids])).logits[0]
    found = stages[-1].logits(rows)
    if "dtype" in changes:  # in bfloat16 both are off; ours by no more than theirs
        assert (found - exact).abs().mean() < 1.2 * (expected - exact).abs().mean()
    else:
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_host_reads_its_own_tensors_only(tmp_path: Path) -> None:
    llama(tmp_path)
    directory = ModelDirectory(tmp_path)
    parts = [directory.tensors(directory.served.tensor_names(stage, 5), torch.float32) for stage in range(5)]
    assert set(parts[2]) == set(directory.served.tensor_names(2, 5))
    assert all(name.startswith("model.layers.2.") for name in parts[2])
    whole = directory.tensors(directory.served.tensor_names(0, 1), torch.float32)
    assert sum(total_bytes(part.values()) for part in parts) == total_bytes(whole.values())


def test_the_digest_tells_models_apart(tmp_path: Path) -> None:
    write_model(run_config(), tmp_path / "a")
    write_model(run_config(), tmp_path / "b")
    write_model(run_config(Bottleneck.RESBM), tmp_path / "c")
    a, b, c = (ModelDirectory(tmp_path / name) for name in "abc")
    assert a.digest == b.digest != c.digest
    assert (a.name, a.served.max_stages, c.served.max_stages) == ("a", 6, 3)
    assert c.served.wire_width == 4
    assert c.served.wire_dtype == "bfloat16"


def test_a_model_with_cuts_is_put_together_and_not_cut_again(tmp_path: Path) -> None:
    write_model(run_config(Bottleneck.RESBM), tmp_path / "m")
    served = ModelDirectory(tmp_path / "m").served
    assert [served.num_layers(stage, 2) for stage in range(2)] == [2, 4]
    with pytest.raises(InvalidConfig, match="in 1 to 3 stages, got 4"):
        served.stages(0, 4)
    with pytest.raises(InvalidConfig, match=r"stage must be in \[0, 2\)"):
        served.stages(2, 2)
    write_model(blocktrain_config(Objective.DIFFUSION), tmp_path / "d")
    with pytest.raises(InvalidConfig, match="exactly 3 stages"):
        ModelDirectory(tmp_path / "d").served.stages(0, 2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "gpt2"}, "model_type must be llama, strata or strata_pooled"),
        ({"attention_bias": True}, "attention_bias cannot be served"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"head_dim": 32}, "head_dim must be hidden_size / num_attention_heads"),
        ({"num_attention_heads": 5, "head_dim": None}, "model.width / model.num_heads"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters: Expected `float`"),
        ({"model_type": "strata_denoising"}, "model_type must be llama, strata or strata_pooled"),
        ({"hidden_size": "wide"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type must be default or llama3"),
    ],
)
def test_what_cannot_be_served_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    write_model(run_config(), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    with pytest.raises(InvalidConfig, match=text):
        read_config(json.dumps(config | change).encode())


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no model directory: it has no config.json"):
        ModelDirectory(tmp_path)
    place = write_model(run_config(), tmp_path / "m")
    (place / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidConfig, match="is no safetensors file"):
        ModelDirectory(place)
    (place / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig, match=r"neither model\.safetensors nor"):
        ModelDirectory(place)


def test_options_are_checked() -> None:
    options = read_options({"model": "m", "stage": "1/3", "hosts": ["127.0.0.1:9", "[::1]:10"]})
    assert options.stage_of == (1, 3)
    assert options.endpoints == (Endpoint(host="127.0.0.1", port=9), Endpoint(host="::1", port=10))
    for wrong in (
        {},
        {"model": "m", "stage": "3"},
        {"model": "m", "hosts": ["nowhere"]},
        {"model": "m", "port": 70000},
    ):
        with pytest.raises(InvalidConfig, match="strata serve"):
            read_options(dict(wrong))
    with pytest.raises(InvalidConfig, match="K must be below N"):
        _ = ServeOptions(model="m", stage="3/3").stage_of


def test_a_port_that_strangers_reach_needs_a_key() -> None:
    check_key("127.0.0.1", "", "STRATA_SERVE_KEY")
    check_key("::1", "", "STRATA_SERVE_KEY")
    check_key("0.0.0.0", "k" * 16, "STRATA_SERVE_KEY")
    for host in ("0.0.0.0", "10.0.0.1", "example.org"):
        with pytest.raises(InvalidConfig, match="set STRATA_SERVE_KEY to the same secret"):
            check_key(host, "", "STRATA_SERVE_KEY")
    with pytest.raises(InvalidConfig, match="at least 16 characters"):
        check_key("127.0.0.1", "short", "STRATA_SERVE_KEY")
