"""What a local subnet consists of is decided, and refused, before anything starts."""

import socket
import stat
from pathlib import Path

import bittensor as bt
import pytest

from neurons import settings
from neurons.exit_codes import ExitCode
from neurons.local.chain import devnet_config, make_genesis, read_genesis, write_genesis
from neurons.local.keys import create_wallets, hotkeys_of
from neurons.local.plan import CLOSED_PORT, HOST, NETUID, Layout, Plan, make_plan, require_fresh
from neurons.localnet import run_localnet
from subnet.errors import InvalidConfig, StartupRefused


def plan(directory: Path, **flags: object) -> Plan:
    keys = {"localnet.directory": str(directory), "localnet.num_miners": 3, "localnet.num_validators": 2} | flags
    return make_plan(*settings.load_localnet(keys, environment={}))


def test_each_process_has_its_name_key_and_port(tmp_path: Path) -> None:
    found = plan(tmp_path, **{"localnet.cheats": "identity:2"})
    assert [part.name for part in found.parts] == ["orchestrator", "m1", "m2", "m3", "v1", "v2"]
    assert [part.cheat for part in found.of_role("miner")] == ["", "identity", ""]
    ports = [found.chain_port, *(part.port for part in found.parts)]
    assert len(set(ports)) == 7
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_role_is_told_everything_by_its_configuration(tmp_path: Path) -> None:
    found = plan(tmp_path)
    miner = found.of_role("miner")[1]
    config = found.node_config(miner)
    assert (config.node.wallet, config.node.hotkey, config.node.netuid) == ("miners", "m2", NETUID)
    assert (config.node.endpoint, config.node.listen_host, config.node.port) == (found.chain_url, HOST, miner.port)
    assert config.node.data_path == tmp_path / "nodes" / "m2"
    assert config.node.num_threads == 1
    assert config.run == found.config.run
    file = tmp_path / "node.toml"
    file.write_text(settings.to_toml(config))
    assert settings.load(file=str(file), preset="local", environment={}) == config


def test_ports_follow_port_base_and_one_that_is_taken_is_named(tmp_path: Path) -> None:
    free = plan(tmp_path).chain_port
    found = plan(tmp_path, **{"localnet.port_base": free})
    assert [found.chain_port, *(part.port for part in found.parts)] == list(range(free, free + 7))
    with socket.socket() as holder:
        holder.bind((HOST, free + 3))
        holder.listen()
        with pytest.raises(StartupRefused, match=rf"port {free + 3} is taken.*\n.*--port-base") as refused:
            plan(tmp_path, **{"localnet.port_base": free})
    assert refused.value.exit_code == ExitCode.PORT_TAKEN


def test_wallets_are_real_without_password_and_the_same_for_a_seed(tmp_path: Path) -> None:
    first = create_wallets(plan(tmp_path / "a", **{"localnet.seed": 7}))
    again = create_wallets(plan(tmp_path / "b", **{"localnet.seed": 7}))
    other = create_wallets(plan(tmp_path / "c", **{"localnet.seed": 8}))
    assert hotkeys_of(first) == hotkeys_of(again)
    assert not set(hotkeys_of(first).values()) & set(hotkeys_of(other).values())
    assert len(set(hotkeys_of(first).values())) == 6
    loaded = bt.Wallet("miners", "m3", str(tmp_path / "a" / "wallets"))
    assert loaded.hotkey.ss58_address == hotkeys_of(first)["m3"]
    assert not loaded.coldkey_file.is_encrypted()
    assert len({first[f"m{number}"].coldkeypub.ss58_address for number in (1, 2, 3)}) == 1
    assert len({first[name].coldkeypub.ss58_address for name in ("m1", "v1", "v2", "orchestrator")}) == 4
    assert stat.S_IMODE(Path(loaded.hotkey_file.path).stat().st_mode) & 0o077 == 0


def test_the_genesis_opens_the_same_chain_again(tmp_path: Path) -> None:
    found = plan(tmp_path, **{"localnet.tempo_blocks": 30, "localnet.block_time_s": 0.5})
    wallets = create_wallets(found)
    genesis = make_genesis(found, wallets)
    write_genesis(found.layout, genesis)
    assert read_genesis(found.layout) == genesis
    chain = devnet_config(genesis, directory=found.layout.chain, port=1)
    assert (chain.block_time_s, chain.subnets[0].hyperparameters["tempo"]) == (0.5, 30)
    assert chain.subnets[0].owner_hotkey == hotkeys_of(wallets)["orchestrator"]
    assert set(chain.prefunded) == {wallet.coldkeypub.ss58_address for wallet in wallets.values()}


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"{}", ExitCode.DAMAGED_STATE, "is damaged"),
        (None, ExitCode.FOREIGN_DIRECTORY, "holds no local subnet"),
    ],
)
def test_a_genesis_that_is_not_there_or_damaged(tmp_path: Path, content: bytes | None, code: int, said: str) -> None:
    layout = Layout(tmp_path)
    if content is not None:
        layout.chain.mkdir()
        layout.genesis.write_bytes(content)
    with pytest.raises(StartupRefused, match=said) as refused:
        read_genesis(layout)
    assert refused.value.exit_code == code


def test_only_a_new_or_empty_directory_is_used(tmp_path: Path) -> None:
    require_fresh(Layout(tmp_path))
    require_fresh(Layout(tmp_path / "new"))
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StartupRefused, match=r"no local subnet's \(it has thesis.tex\); nothing was changed"):
        require_fresh(Layout(tmp_path))
    with pytest.raises(StartupRefused, match="is a file"):
        require_fresh(Layout(tmp_path / "thesis.tex"))


@pytest.mark.parametrize(("is_finished", "said"), [(False, "an unfinished local subnet"), (True, "strata audit")])
def test_the_directory_of_another_run_is_left_alone(tmp_path: Path, is_finished: bool, said: str) -> None:
    layout = Layout(tmp_path)
    layout.chain.mkdir()
    layout.genesis.write_text("{}")
    if is_finished:
        layout.report.write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StartupRefused, match=said) as refused:
        run_localnet(*settings.load_localnet({"localnet.directory": str(tmp_path)}, environment={}))
    assert refused.value.exit_code == ExitCode.FOREIGN_DIRECTORY
    assert sorted(tmp_path.rglob("*")) == before


def test_a_miner_that_nobody_can_dial_announces_a_closed_port(tmp_path: Path) -> None:
    found = plan(tmp_path, **{"localnet.unreachable": "2"})
    announced = [found.node_config(part).node.external_port for part in found.of_role("miner")]
    assert announced == [0, CLOSED_PORT, 0]
    with pytest.raises(InvalidConfig, match=r"localnet.unreachable takes miners in \[1, 3\], got 4"):
        plan(tmp_path, **{"localnet.unreachable": "1,4"})


def test_an_unknown_cheat_is_named_before_anything_starts(tmp_path: Path) -> None:
    flags = {"localnet.directory": str(tmp_path / "net"), "localnet.cheats": "nonsense:1"}
    with pytest.raises(InvalidConfig, match=r"takes a kind of identity, .*, got 'nonsense'"):
        run_localnet(*settings.load_localnet(flags, environment={}))
    assert not (tmp_path / "net").exists()
