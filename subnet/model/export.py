"""A merged run as a directory that transformers loads: configuration, params, tokenizer (bytes in, names and bytes out).

An uncut model is a plain LlamaForCausalLM. One with a bottleneck or anchors is a class of its own, whose source file
(modeling_strata.py) goes into the directory. Params stay float32, so that logits are those of the run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from subnet.config import Bottleneck, RunConfig
from subnet.errors import InvalidConfig
from subnet.model.flat import unflatten
from subnet.model.partition import ANCHOR_RANK, boundary_width, has_anchor, is_anchor_factored, param_shapes
from subnet.types import StageIndex

CLASS_FILE = "modeling_strata.py"
SHARD_LIMIT_BYTES = 2 << 30
NUM_BYTES = 256

NamedBytes = tuple[str, bytes]


def is_plain_llama(config: RunConfig) -> bool:
    """Whether the stages in a row are Llama and nothing else."""
    model = config.model
    has_cuts = config.training.num_stages > 1
    return not has_cuts or (model.bottleneck is Bottleneck.NONE and not has_anchor(model))


def model_config(config: RunConfig) -> dict[str, Any]:
    """What goes into config.json. `max_position_embeddings` is the longest context that was trained on."""
    model = config.model
    is_plain = is_plain_llama(config)
    name = "LlamaForCausalLM" if is_plain else "StrataForCausalLM"
    fields: dict[str, Any] = {
        "architectures": [name],
        "model_type": "llama" if is_plain else "strata",
        "dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.width // model.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.training.num_tokens,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if is_plain:
        return fields
    module = CLASS_FILE.removesuffix(".py")
    return fields | {
        "auto_map": {"AutoConfig": f"{module}.StrataConfig", "AutoModelForCausalLM": f"{module}.{name}"},
        "bottleneck": str(model.bottleneck),
        "bottleneck_width": model.bottleneck_width,
        "boundary_width": boundary_width(model),
        "num_stages": config.training.num_stages,
        "has_anchor": has_anchor(model),
        "anchor_rank": ANCHOR_RANK if is_anchor_factored(model) else 0,
    }


def byte_tokenizer() -> Tokenizer:
    """Token ids are byte values; any text comes back as it was. Spelled in the alphabet of byte-level tokenizers."""
    alphabet = _byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte: itself where it is printable in Latin-1, else U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(NUM_BYTES)]


def tokenizer_files(config: RunConfig) -> list[NamedBytes]:
    """Files that AutoTokenizer reads. Raises InvalidConfig for a tokenizer that this build cannot write."""
    if config.corpus.tokenizer != "bytes":
        raise InvalidConfig(f"no tokenizer file can be written for corpus.tokenizer {config.corpus.tokenizer!r}")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.training.num_tokens,
        "clean_up_tokenization_spaces": False,
    }
    return [
        ("tokenizer.json", byte_tokenizer().to_str().encode()),
        ("tokenizer_config.json", _json(settings)),
    ]


def param_files(
    config: RunConfig, stage_params: Sequence[npt.NDArray[np.float32]], *, shard_limit_bytes: int = SHARD_LIMIT_BYTES
) -> Iterator[NamedBytes]:
    """Safetensors files, and an index when there is more than one. Raises ProtocolViolation for params of another shape."""
    groups = _grouped(config, stage_params, shard_limit_bytes)
    if len(groups) == 1:
        yield "model.safetensors", _saved(groups[0])
        return
    places: dict[str, str] = {}
    for index, group in enumerate(groups, start=1):
        name = f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        places |= dict.fromkeys(group, name)
        yield name, _saved(group)
    total = sum(4 * vector.size for vector in stage_params)
    index_file = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    yield "model.safetensors.index.json", _json(index_file)


def _grouped(
    config: RunConfig, stage_params: Sequence[npt.NDArray[np.float32]], limit_bytes: int
) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for stage, vector in zip(range(config.training.num_stages), stage_params, strict=True):
        for name, tensor in unflatten(vector, param_shapes(config, StageIndex(stage))).items():
            if groups[-1] and size + tensor.nbytes > limit_bytes:
                groups.append({})
                size = 0
            groups[-1][name] = tensor
            size += tensor.nbytes
    return groups


def _saved(tensors: Mapping[str, Tensor]) -> bytes:
    return safetensors.torch.save(dict(tensors), metadata={"format": "pt"})


def config_files(config: RunConfig, *, provenance: Mapping[str, Any]) -> list[NamedBytes]:
    """config.json, generation_config.json, and strata.json, which says what run and epoch this is."""
    generation = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "do_sample": False}
    return [
        ("config.json", _json(model_config(config))),
        ("generation_config.json", _json(generation)),
        ("strata.json", _json(dict(provenance))),
    ]


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
