"""What stands between a person and a running node: the wallet, the subnet, the registration."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import bittensor as bt
import msgspec
import pytest
from bittensor.keyfiles import Keypair

from neurons.discovery import find_run, read_metagraph, reasons_to_earn_nothing, require_registered
from neurons.exit_codes import ExitCode
from neurons.orchestrator import announce_run
from neurons.settings import NodeConfig, NodeSettings
from neurons.wallets import load_hotkey
from neurons.wiring import ANNOUNCED_URL, grant_secret, owner_url, read_description, state_store
from subnet import wire
from subnet.adapters.system import DirectoryDisk
from subnet.errors import DamagedState, InvalidConfig, NotFound, ProtocolViolation, StartupRefused, TransientFailure
from subnet.types import Endpoint, Hotkey, Metagraph, Neuron, Uid

OWNER = Hotkey("5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY")
MINER = Hotkey("5FHneW46xGXgs5mUiveU4sbTyGBzmstUspZC92UhjJM694ty")
RUN = wire.Discovery(u="http://127.0.0.1:8090", r="run-1", v=wire.PROTOCOL_VERSION, c="0" * 64)


class FixedChain:
    """A chain that holds still (ports.Chain): one subnet, or none, or out of reach."""

    def __init__(self, graph: Metagraph | None, record: bytes | None = None, *, is_down: bool = False) -> None:
        self._graph = graph
        self._record = record
        self._is_down = is_down

    async def block(self) -> int:
        return 100

    async def block_hash(self, number: int) -> str | None:
        return f"{number:064x}"

    async def metagraph(self) -> Metagraph:
        if self._is_down:
            raise TransientFailure("ws://127.0.0.1:9944 refused the connection")
        if self._graph is None:
            raise NotFound("no such subnet")
        return self._graph

    async def commitment(self, hotkey: Hotkey) -> bytes | None:
        assert hotkey == OWNER
        return self._record

    async def commit(self, data: bytes) -> int:
        raise AssertionError("a search for the run writes nothing")

    async def set_weights(self, weights: Mapping[Hotkey, float]) -> int:
        raise AssertionError("a search for the run writes nothing")

    async def weights(self, hotkey: Hotkey) -> dict[Uid, int]:
        return {}

    async def serve(self, endpoint: Endpoint) -> None:
        raise AssertionError("a search for the run writes nothing")


def neuron(uid: int, hotkey: Hotkey, *, permit: bool = False, updated: int = 90, incentive: float = 0.0) -> Neuron:
    return Neuron(
        uid=Uid(uid),
        hotkey=hotkey,
        coldkey="",
        stake=1.0,
        validator_permit=permit,
        registered_at_block=1,
        last_update_block=updated,
        is_active=True,
        incentive=incentive,
        dividends=0.0,
        emission=0.0,
    )


def graph(*neurons: Neuron) -> Metagraph:
    return Metagraph(netuid=7, at_block=100, owner_hotkey=OWNER, tempo=10, neurons=neurons)


async def refused(chain: FixedChain, netuid: int = 7) -> StartupRefused:
    with pytest.raises(StartupRefused) as caught:
        await find_run(chain, netuid)
    assert len(str(caught.value).splitlines()) <= 2
    return caught.value


async def test_the_run_is_what_the_owner_committed() -> None:
    assert await find_run(FixedChain(graph(), wire.encode(RUN)), 7) == (RUN, OWNER)


async def test_no_netuid_no_subnet_no_chain() -> None:
    assert (await refused(FixedChain(graph()), 0)).exit_code == ExitCode.INVALID_CONFIG
    missing = await refused(FixedChain(None))
    assert (missing.exit_code, "no subnet 7" in str(missing)) == (ExitCode.NO_SUCH_NETUID, True)
    down = await refused(FixedChain(None, is_down=True))
    assert (down.exit_code, "refused the connection" in str(down)) == (ExitCode.CHAIN_UNREACHABLE, True)
    assert (await read_metagraph(FixedChain(graph()), 7)).netuid == 7


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (None, "has committed no run"),
        (b"", "no Strata record"),
        (b"\xff\xfe", "no Strata record"),
        (b'{"name": "other project"}', "no Strata record"),
        (b"[" * 5000, "no Strata record"),
        (b'{"v":1,"u":"http://h:1","r":"x"}', "no Strata record (message does not decode"),
        *(
            (wire.encode(msgspec.structs.replace(RUN, u=url)), "no usable orchestrator URL")
            for url in ("file:///etc/passwd", "http://", "http://[bad", "http://h:99999999", "http://h/?a=", "h:80", "")
        ),
    ],
)
async def test_a_subnet_without_a_run_says_so(record: bytes | None, text: str) -> None:
    error = await refused(FixedChain(graph(), record))
    assert error.exit_code == ExitCode.NO_RUN
    assert text in str(error)


@pytest.mark.parametrize(
    ("version", "text"), [(wire.PROTOCOL_VERSION + 1, "Update this software"), (0, "The run is the older side")]
)
async def test_another_protocol_version_names_the_side_to_update(version: int, text: str) -> None:
    record = wire.encode({**msgspec.to_builtins(RUN), "v": version, "new_field": 1})
    error = await refused(FixedChain(graph(), record))
    assert error.exit_code == ExitCode.VERSION_MISMATCH
    assert text in str(error)


def test_an_unregistered_hotkey_is_told_price_and_command() -> None:
    node = NodeSettings(wallet="w", hotkey="h", network="test")
    assert require_registered(graph(neuron(3, MINER)), MINER, node=node).uid == 3
    with pytest.raises(StartupRefused) as caught:
        require_registered(graph(), MINER, node=node, price_tao=0.0005)
    assert caught.value.exit_code == ExitCode.NOT_REGISTERED
    assert str(caught.value).splitlines() == [
        f"hotkey {MINER} is not registered on netuid 7. Registration costs 0.0005 TAO now; to pay it, type:",
        "btcli subnets register --netuid 7 -w w -H h -n test",
    ]
    with pytest.raises(StartupRefused, match="btcli subnets burn-cost 7 tells the price"):
        require_registered(graph(), MINER, node=NodeSettings())


def test_a_subnet_that_pays_nobody_is_named() -> None:
    validator = neuron(1, MINER, permit=True)
    assert reasons_to_earn_nothing(graph(validator), is_started=True) == []
    assert reasons_to_earn_nothing(graph(validator)) == []
    cases = [
        (graph(validator), False, "never started"),
        (graph(neuron(1, MINER)), None, "no validator has a permit"),
        (graph(neuron(1, MINER, permit=True, updated=79)), None, "no validator has set weights for 20 blocks"),
        (graph(validator, neuron(0, OWNER, incentive=1.0)), True, "owner's hotkey, which burns it"),
    ]
    for metagraph, is_started, text in cases:
        (reason,) = reasons_to_earn_nothing(metagraph, is_started=is_started)
        assert reason.startswith("you will earn 0 because")
        assert text in reason


# ---- wallets -------------------------------------------------------------------------------------------------------


def settings(path: Path, hotkey: str = "h", wallet: str = "w") -> NodeSettings:
    return NodeSettings(wallet=wallet, hotkey=hotkey, wallet_path=str(path))


def make(path: Path, *, password: str | None = None) -> str:
    keypair = Keypair.create_from_uri("//Strata")
    file = bt.Wallet("w", "h", str(path)).hotkey_file
    file.set_keypair(keypair, encrypt=password is not None, password=password)
    return str(keypair.ss58_address)


def denied(node: NodeSettings, code: ExitCode) -> str:
    with pytest.raises(StartupRefused) as caught:
        load_hotkey(node, is_interactive=False)
    assert caught.value.exit_code == code
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_a_plain_hotkey_loads_without_any_coldkey(tmp_path: Path) -> None:
    address = make(tmp_path)
    assert load_hotkey(settings(tmp_path)).ss58_address == address
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["hotkeys"]


def test_a_missing_wallet_or_hotkey_says_what_to_type(tmp_path: Path) -> None:
    text = denied(settings(tmp_path), ExitCode.NO_WALLET)
    assert "no wallet 'w'" in text and "btcli wallet create -w w -H h" in text
    make(tmp_path)
    assert "it has w" in denied(settings(tmp_path, wallet="x"), ExitCode.NO_WALLET)
    text = denied(settings(tmp_path, hotkey="other"), ExitCode.NO_WALLET)
    assert "no hotkey 'other' (it has h)" in text and "btcli wallet new-hotkey -w w -H other" in text


def test_a_place_of_wallets_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    assert "it cannot be read: Not a directory" in denied(settings(tmp_path / "file"), ExitCode.NO_WALLET)
    assert "it does not exist" in denied(settings(tmp_path / "gone"), ExitCode.NO_WALLET)
    too_long = tmp_path / ("x" * 300)  # what stat refuses, as it does a directory that this user may not enter
    assert "it cannot be read: File name too long" in denied(settings(too_long), ExitCode.NO_WALLET)


def test_an_encrypted_hotkey_without_a_terminal_names_the_variable_at_once(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "w" / "hotkeys" / "h").write_bytes(b"$NACL" + bytes(64))
    assert "STRATA_HOTKEY_PASSWORD" in denied(settings(tmp_path), ExitCode.HOTKEY_ENCRYPTED)


@pytest.mark.slow  # the SDK spends seconds on purpose at each guess of a password
def test_a_password_unlocks_and_a_wrong_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = make(tmp_path, password="open sesame")
    monkeypatch.setenv("STRATA_HOTKEY_PASSWORD", "open sesame")
    assert load_hotkey(settings(tmp_path)).ss58_address == address
    monkeypatch.delenv("STRATA_HOTKEY_PASSWORD")
    file = bt.Wallet("w", "h", str(tmp_path)).hotkey_file
    monkeypatch.setenv(file.env_var_name(), "")  # so that what the SDK saves there goes with the test
    file.save_password_to_env("guess")
    assert "is wrong" in denied(settings(tmp_path), ExitCode.HOTKEY_ENCRYPTED)


def test_a_damaged_or_public_key_file_is_refused(tmp_path: Path) -> None:
    address = make(tmp_path)
    hotkeys = tmp_path / "w" / "hotkeys"
    (hotkeys / "junk").write_bytes(b"\x00\x01 no key")
    assert "btcli wallet regen-hotkey -w w -H junk" in denied(settings(tmp_path, hotkey="junk"), ExitCode.NO_WALLET)
    public = "0x" + bytes(Keypair(ss58_address=address).public_key).hex()
    (hotkeys / "public").write_bytes(msgspec.json.encode({"ss58Address": address, "publicKey": public}))
    assert "only a public key" in denied(settings(tmp_path, hotkey="public"), ExitCode.NO_WALLET)


async def test_an_orchestrator_keeps_the_url_it_was_announced_with(tmp_path: Path) -> None:
    disk = DirectoryDisk(tmp_path)
    behind_a_proxy = NodeConfig(node=NodeSettings(listen_host="127.0.0.1", port=8090))
    assert await owner_url(behind_a_proxy, disk) == "http://127.0.0.1:8090"
    await disk.write(ANNOUNCED_URL, b"https://strata.example.org/")
    assert await owner_url(behind_a_proxy, disk) == "https://strata.example.org"
    moved = NodeConfig(node=NodeSettings(url="https://elsewhere.example.org"))
    assert await owner_url(moved, disk) == "https://elsewhere.example.org"
    assert await owner_url(moved, disk, "https://new.example.org") == "https://new.example.org"


def test_the_key_of_granted_urls_is_whole_or_none(tmp_path: Path) -> None:
    path = tmp_path / "blob-secret"
    secret = grant_secret(path)
    assert (len(secret), path.stat().st_mode & 0o077) == (32, 0)
    assert grant_secret(path) == secret
    path.write_bytes(b"")  # what a kill or a full disk once left: everybody knows an empty key
    with pytest.raises(DamagedState, match="Delete it"):
        grant_secret(path)


async def test_a_run_id_that_is_no_name_and_a_state_store_that_is_none_are_mistakes(tmp_path: Path) -> None:
    for run_id in ("../../x", "", "a b", "x" * 65, ".x"):
        with pytest.raises(InvalidConfig, match="--run-id takes"):
            await announce_run(NodeConfig(), url="http://h", run_id=run_id)
    async with contextlib.AsyncExitStack() as stack:
        for url in ("nonsense", "redis://:secret@h:port"):
            with pytest.raises(InvalidConfig, match="--state-url") as caught:
                await state_store(NodeConfig(node=NodeSettings(state_url=url, data_dir=str(tmp_path))), stack)
            assert "secret" not in str(caught.value)


class Serving:
    """A run's public objects."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def read(self, name: str, *, limit_bytes: int) -> bytes:
        if len(self.data) > limit_bytes:
            raise ProtocolViolation("answer is too long")
        return self.data


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ExitCode.VERSION_MISMATCH),
        (b"{}\n{}\n\xff", ExitCode.VERSION_MISMATCH),
        (b"\xff\n\xfe\n0", ExitCode.VERSION_MISMATCH),
        (b'{"training":{"num_stages":7}}\n{}\n0', ExitCode.VERSION_MISMATCH),
        (b"{}\n{}\n0", ExitCode.NO_RUN),
        (bytes((1 << 20) + 1), ExitCode.UNAVAILABLE),
    ],
)
async def test_a_description_that_is_none_is_told_in_words(data: bytes, code: ExitCode) -> None:
    with pytest.raises(StartupRefused) as caught:
        await read_description(Serving(data), RUN)
    assert caught.value.exit_code == code
