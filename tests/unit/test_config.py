import tomllib

import msgspec
import pytest

from subnet.config import (
    WIRE_COMPRESSION,
    AuditConfig,
    Bottleneck,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    config_bytes,
)
from subnet.errors import InvalidConfig


def read(text: str) -> RunConfig:
    return msgspec.convert(tomllib.loads(text), RunConfig)


def test_the_defaults_are_a_valid_run() -> None:
    config = RunConfig()
    assert read("") == config
    assert msgspec.json.decode(config_bytes(config), type=RunConfig) == config


def test_the_digest_of_a_run_depends_on_every_part() -> None:
    texts = ["", "[model]\nseed = 1", "[training]\naccumulate = 5", "[corpus]\nseed = 1", "[merge]\nnorm_cap = 2.0"]
    texts += ["[audit]\nprobability = 0.2", "[deadlines]\nsample_s = 61.0"]
    assert len({config_bytes(read(text)) for text in texts}) == len(texts)
    assert config_bytes(read("[model]\nwidth = 128\nseed = 2")) == config_bytes(read("[model]\nseed = 2\nwidth = 128"))


def test_the_default_wire_is_128_times_smaller() -> None:
    config = RunConfig()
    batch, tokens, width = config.wire_shape
    sent = batch * tokens * width * config.wire_item_bytes
    assert batch * tokens * config.model.width * 4 == WIRE_COMPRESSION * sent


@pytest.mark.parametrize(
    ("bottleneck", "width", "item_bytes"),
    [(Bottleneck.RESBM, 4, 2), (Bottleneck.IOTA, 4, 2), (Bottleneck.NONE, 256, 4), (Bottleneck.K0, 1, 2)],
)
def test_what_crosses_a_cut(bottleneck: Bottleneck, width: int, item_bytes: int) -> None:
    config = RunConfig(model=ModelConfig(bottleneck=bottleneck))
    assert config.wire_shape == (8, 128, width)
    assert config.wire_item_bytes == item_bytes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nwidht = 3", r"`widht` - at `\$\.model`"),
        ("[modle]\nwidth = 64", "`modle`"),
        ("[model]\nwidth = 4", r">= 8 - at `\$\.model\.width`"),
        ('[model]\nwidth = "wide"', r"`int`, got `str` - at `\$\.model\.width`"),
        ("[model]\nvocab_size = 1048577", r"<= 1048576 - at `\$\.model\.vocab_size`"),
        ('[model]\nbottleneck = "funnel"', r"'funnel' - at `\$\.model\.bottleneck`"),
        ("[training]\nquorum = 0.0", r"> 0\.0 - at `\$\.training\.quorum`"),
        ("[training]\nquorum = 1.01", r"<= 1\.0 - at `\$\.training\.quorum`"),
        ("[training]\nouter_momentum = 1.0", r"< 1\.0 - at `\$\.training\.outer_momentum`"),
        ('[training]\nmodes = ["fp8"]', r"'fp8' - at `\$\.training\.modes\[0\]`"),
        ("[corpus]\nheldout_fraction = 0.5", r"< 0\.5 - at `\$\.corpus\.heldout_fraction`"),
        ("[merge]\nchunk_bytes = 100", r"multiple of 64 - at `\$\.merge\.chunk_bytes`"),
        ("[audit]\nprobability = 2.0", r"<= 1\.0 - at `\$\.audit\.probability`"),
        ("[deadlines]\nsample_s = -1.0", r"> 0\.0 - at `\$\.deadlines\.sample_s`"),
        ("[deadlines]\ntraining_s = 604801.0", r"<= 604800\.0 - at `\$\.deadlines\.training_s`"),
        ("[audit]\nmax_rel_d = true", r"`float`, got `bool` - at `\$\.audit\.max_rel_d`"),
    ],
)
def test_a_bad_value_is_named_with_its_range(text: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        read(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\nnum_heads = 3", r"model\.width / model\.num_heads must be an even whole number, got 256 / 3"),
        ("[model]\nnum_heads = 256", "even whole number, got 256 / 256"),
        ("[model]\nnum_kv_heads = 3", r"multiple of model\.num_kv_heads, got 4 and 3"),
        ("[model]\nbottleneck_width = 257", r"model\.bottleneck_width must be in \[1, model\.width = 256\], got 257"),
        ("[training]\nmin_batches = 49", r"training\.min_batches must be in \[1, .*48\], got 49"),
        ("[training]\nmodes = []", r"training\.modes must name at least one"),
        ("[training]\nnum_stages = 7", r"training\.num_stages must be in \[1, model\.num_layers = 6\], got 7"),
    ],
)
def test_values_that_do_not_fit_each_other_are_named(text: str, words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        read(text)


def test_a_config_cannot_be_changed() -> None:
    for config in (RunConfig(), ModelConfig(), TrainingConfig(), AuditConfig()):
        name = config.__struct_fields__[0]
        with pytest.raises(AttributeError):
            setattr(config, name, getattr(config, name))
