"""What a person can set, in which order, and what a mistake says."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurons import settings, tables
from neurons.settings import KNOBS, NodeConfig, load, to_toml
from subnet.config import Bottleneck, Objective, RunKind
from subnet.errors import InvalidConfig
from subnet.types import NumericMode

NOTHING: dict[str, str] = {}


def write(directory: Path, text: str) -> str:
    file = directory / "run.toml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_a_preset_spells_out_every_knob_and_nothing_else(preset: str) -> None:
    text = (Path(settings.__file__).parent / "presets" / f"{preset}.toml").read_text()
    spelled = {f"{section}.{key}" if section else key for section, key in _keys(text)}
    assert spelled == set(KNOBS)
    load(preset=preset, environment=NOTHING)


def _keys(text: str) -> Iterator[tuple[str, str]]:
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line[1 : line.index("]")]
        elif " = " in line and not line.startswith("#"):
            yield section, line.split(" = ")[0]


@pytest.mark.parametrize("preset", settings.PRESETS)
def test_presets_compress_128_times(preset: str) -> None:
    model = load(preset=preset, environment=NOTHING).run.model
    assert model.width == 64 * model.bottleneck_width


def test_flags_win_over_variables_over_file_over_preset(tmp_path: Path) -> None:
    file = write(tmp_path, '[training]\nnum_stages = 2\nnum_epochs = 7\n[node]\nwallet = "from-file"\nport = 1000\n')
    config = load(
        {"node.hotkey": "typed"},
        preset="local",
        file=file,
        environment={"BT_WALLET": "from-variable", "BT_WALLET_HOTKEY": "lost", "STRATA_TRAINING__NUM_EPOCHS": "9"},
    )
    assert config.run.training.num_stages == 2
    assert config.run.training.num_epochs == 9
    assert (config.node.wallet, config.node.hotkey, config.node.port) == ("from-variable", "typed", 1000)
    assert config.run.audit.probability == 1.0


def test_variables_of_the_ecosystem_and_our_own() -> None:
    config = load(
        environment={
            "BT_NETWORK": "test",
            "BT_WALLET_PATH": "/keys",
            "BT_CHAIN_ENDPOINT": "ws://127.0.0.1:9944",
            "STRATA_NETUID": "12",
            "STRATA_MODEL__BOTTLENECK": "k0",
            "STRATA_TRAINING__MODES": "fp32",
            "STRATA_MODEL__ANCHOR_IDS": "false",
            "STRATA_MODEL__NORM_EPS": "1e-6",
            "STRATA_STATE_URL": "",
        }
    )
    assert (config.node.network, config.node.wallet_path, config.node.netuid) == ("test", "/keys", 12)
    assert config.node.endpoint == "ws://127.0.0.1:9944"
    assert config.run.model.bottleneck is Bottleneck.K0
    assert config.run.training.modes == (NumericMode.FP32,)
    assert config.run.model.anchor_ids is False
    assert config.run.model.norm_eps == 1e-6
    assert config.run == load(config_overrides(), preset="testnet", environment=NOTHING).run


def config_overrides() -> dict[str, object]:
    return {
        "model.bottleneck": "k0",
        "training.modes": "fp32",
        "model.anchor_ids": "false",
        "model.norm_eps": "1e-6",
    }


def test_the_network_chooses_the_preset_unless_one_is_named() -> None:
    assert load(environment=NOTHING).run == load(preset="mainnet", environment=NOTHING).run
    assert load({"node.network": "local"}, environment=NOTHING).run == load(preset="local", environment=NOTHING).run
    named = load({"node.network": "local"}, environment={"STRATA_PRESET": "testnet"})
    assert named.run == load(preset="testnet", environment=NOTHING).run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[training]\nnum_stage = 3", "unknown key training.num_stage in run.toml; did you mean training.num_stages?"),
        ("num_stages = 3", "unknown key num_stages in run.toml; did you mean training.num_stages?"),
        ("[trainin]\nqorum = 0.5", "unknown key trainin.qorum in run.toml; did you mean training.quorum?"),
        ("[merge]\nxyzzy = 1", "unknown key merge.xyzzy in run.toml; [merge] has chunk_bytes, weight_cap, norm_cap"),
        ("xyzzy = 1", "unknown key xyzzy in run.toml"),
        ("[training]\nnum_stages = 0", "training.num_stages in run.toml must be a whole number in [1, 256], got 0"),
        ('[training]\nnum_stages = "3"', 'training.num_stages in run.toml must be a whole number in [1, 256], got "3"'),
        ("[training]\naccumulate = 0", "training.accumulate in run.toml must be a whole number of at least 1, got 0"),
        ("[training]\nquorum = 0", "training.quorum in run.toml must be a number in (0, 1], got 0"),
        ("[training]\nlearning_rate = -1", "training.learning_rate in run.toml must be a number above 0, got -1"),
        ("[training]\nlearning_rate = nan", "training.learning_rate in run.toml must be a number above 0, got NaN"),
        (
            "[training]\nlearning_rate = inf",
            "training.learning_rate in run.toml must be a number above 0, got Infinity",
        ),
        ("[merge]\nchunk_bytes = 65", "must be a whole number of at least 64, a multiple of 64, got 65"),
        ('[model]\nbottleneck = "x"', 'must be one of resbm, iota, none, k0, got "x"'),
        ("[model]\nanchor_ids = 1", "must be true or false, got 1"),
        ('[training]\nmodes = ["fp8"]', 'must be a list, each entry one of fp32, bf16_autocast, got ["fp8"]'),
        ('[node]\nlog_level = "loud"', "must be one of debug, error, info, warning"),
        ('[node]\nwallet = "../x"', "node.wallet in run.toml must be text that matches"),
        ("model = 3", "model in run.toml must be a table, written [model], got 3"),
        ("[training]\nnum_stages = 7", "training.num_stages must be in [1, model.num_layers = 6], got 7"),
        ("[training\n", "run.toml is not TOML: "),
        ("a." * 3000 + "b = 1", "run.toml nests tables or lists too deeply"),
        ("x = " + "[" * 5000 + "]" * 5000, "run.toml nests tables or lists too deeply"),
        ('[node]\nurl = "http://[bad"', "node.url in run.toml must be text that matches"),
        ('[node]\nurl = "https://u:p@host"', "node.url in run.toml must be text that matches"),
        ('[node]\nurl = "https://host/?a=b"', "node.url in run.toml must be text that matches"),
    ],
)
def test_a_mistake_names_key_place_and_range(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(preset="local", file=write(tmp_path, text), environment=NOTHING)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STRATA_NETUIDD": "1"}, "unknown key node.netuidd in variable STRATA_NETUIDD; did you mean node.netuid?"),
        (
            {"STRATA_NETUID": "one"},
            'node.netuid in variable STRATA_NETUID must be a whole number in [0, 65535], got "one"',
        ),
        ({"STRATA_PRESET": "moon"}, "preset must be one of local, testnet, mainnet, got 'moon'"),
        ({"STRATA_CONFIG": "/nowhere/run.toml"}, "there is no configuration file /nowhere/run.toml"),
    ],
)
def test_a_mistaken_variable_is_named(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        load(environment=variables)
    assert expected in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        load(file=str(tmp_path / "run.toml"), environment=NOTHING)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[training]\nnum_epochs = 3\n")
    assert load(file=str(tmp_path / "run.toml"), environment=NOTHING).run.training.num_epochs == 3


@pytest.mark.parametrize("url", ["https://strata.example.org", "http://10.0.0.5:8090/run/", "http://[2001:db8::1]:80"])
def test_urls_of_an_orchestrator(url: str) -> None:
    assert load({"node.url": url}, environment=NOTHING).node.url == url


def test_a_home_that_nobody_has_is_named() -> None:
    for flags in ({"node.data_dir": "~nobody-here/x"}, {"node.lock_dir": "~nobody-here/x"}):
        node = load(flags, environment=NOTHING).node
        with pytest.raises(InvalidConfig, match="~nobody-here/x lies in a home directory"):
            assert node.data_path and node.lock_path
    with pytest.raises(InvalidConfig, match=r"~nobody-here/run\.toml lies in a home directory"):
        load(file="~nobody-here/run.toml", environment=NOTHING)


def test_assignments() -> None:
    assert settings.parse_assignments(["training.num_epochs=4", "node.state_url = redis://h/0?a=b"]) == {
        "training.num_epochs": "4",
        "node.state_url": "redis://h/0?a=b",
    }
    with pytest.raises(InvalidConfig, match="KEY=VALUE"):
        settings.parse_assignments(["num_epochs"])
    with pytest.raises(InvalidConfig, match=r"KEY=VALUE.*got '=3'"):
        settings.parse_assignments(["=3"])


def test_own_directory_tells_networks_and_keys_apart() -> None:
    def path(**flags: object) -> Path:
        return load({f"node.{name}": value for name, value in flags.items()}, environment=NOTHING).node.data_path

    assert path(data_dir="/d") == Path("/d")
    paths = {path(netuid=1), path(netuid=2), path(netuid=1, hotkey="b"), path(netuid=1, chain_endpoint="ws://a:1")}
    assert len(paths) == 4
    assert all(one.is_relative_to(Path.home() / ".strata") for one in paths)


@given(
    st.integers(1, 256),
    st.floats(0.001, 1.0),
    st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=20),
    st.sampled_from(list(Bottleneck)),
    st.booleans(),
)
def test_a_written_configuration_reads_back_equal(
    num_stages: int, quorum: float, text: str, bottleneck: Bottleneck, flag: bool
) -> None:
    original = load(
        {
            "model.num_layers": 256,
            "training.num_stages": num_stages,
            "training.quorum": quorum,
            "node.state_url": text,
            "model.bottleneck": bottleneck.value,
            "model.anchor_ids": flag,
        },
        environment=NOTHING,
    )
    assert _reread(original) == original


def _reread(config: NodeConfig) -> NodeConfig:
    found = tables.flatten(tomllib.loads(to_toml(config)), "text")
    return load({key: setting.value for key, setting in found.items()}, environment=NOTHING)


def test_a_local_subnet_of_blocks_changes_what_its_kind_needs_and_what_is_said_wins(tmp_path: Path) -> None:
    pipeline, _ = settings.load_localnet(environment=NOTHING)
    config, options = settings.load_localnet({"kind": "blocktrain", "training.num_epochs": "2"}, environment=NOTHING)
    training = config.run.training
    assert (pipeline.run.kind, config.run.kind) == (RunKind.PIPELINE, RunKind.BLOCKTRAIN)
    assert (training.num_stages, options.num_miners, training.min_miners, training.num_epochs) == (4, 6, 6, 2)
    assert (training.outer_learning_rate, training.outer_momentum) == (1.0, 0.0), (
        "theta moves by the mean of the deltas"
    )
    assert config.run.blocktrain.objective is Objective.POOLED
    said = {"kind": "blocktrain", "blocktrain.objective": "greedy"}
    assert settings.load_localnet(said, environment=NOTHING)[0].run.blocktrain.objective is Objective.GREEDY
    written = write(tmp_path, 'kind = "blocktrain"\n[training]\nnum_stages = 2\n[localnet]\nnum_miners = 3\n')
    config, options = settings.load_localnet(file=written, environment=NOTHING)
    assert (config.run.training.num_stages, options.num_miners) == (2, 3)
    assert _reread(config) == config
    with pytest.raises(InvalidConfig, match="kind in the flags must be one of pipeline, blocktrain"):
        settings.load_localnet({"kind": "blocks"}, environment=NOTHING)
