"""What people type, and what it becomes."""

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from neurons import cli, commands
from neurons.exit_codes import ExitCode
from neurons.settings import LocalnetOptions, NodeConfig, NodeSettings
from subnet.config import Bottleneck, RunConfig
from subnet.devnet.config import DevnetConfig

ROOT = Path(cli.__file__).parents[1]
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # a group has commands
RECEIVED: list[tuple[object, ...]] = []


def receive(*arguments: object) -> int:
    """Stands where a role would start."""
    RECEIVED.append(arguments)
    return ExitCode.OK


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (
        "BT_NETWORK",
        "BT_WALLET",
        "BT_WALLET_HOTKEY",
        "BT_WALLET_PATH",
        "BT_CHAIN_ENDPOINT",
        "STRATA_NETUID",
    ):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    RECEIVED.clear()
    for command in commands.ENTRIES:
        monkeypatch.setitem(commands.ENTRIES, command, f"{__name__}:receive")
    return RECEIVED


def typed(line: str) -> int:
    """Exit code of `strata <line>`."""
    with pytest.raises(SystemExit) as caught:
        cli.main(shlex.split(line))
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize("role", ["miner", "validator", "orchestrator"])
def test_both_spellings_of_the_ecosystem_mean_the_same(role: str, received: list[tuple[object, ...]]) -> None:
    assert (
        typed(
            f"{role} --netuid 12 --network test --wallet w --hotkey h --wallet-path /k --port 9 --chain-endpoint ws://a:1"
        )
        == 0
    )
    assert typed(
        f"{role} --netuid 12 --subtensor.network test --wallet.name w --wallet.hotkey h --wallet.path /k --axon.port 9 "
        "--subtensor.chain_endpoint ws://a:1"
    ) == 0  # fmt: skip
    assert (
        typed(f"{role} --netuid 12 -n test -w w -H h --wallet-path /k --set node.port=9 --chain-endpoint ws://a:1") == 0
    )
    (first,), (second,), (third,) = received
    assert isinstance(first, NodeConfig)
    assert first == second == third
    assert (first.node.netuid, first.node.wallet, first.node.hotkey, first.node.port) == (12, "w", "h", 9)


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        ("miner --netuid none", 64, 'node.netuid in the flags must be a whole number in [0, 65535], got "none"'),
        ("miner --set trainin.num_epochs=3", 64, "did you mean training.num_epochs?"),
        ("miner --set training", 64, "--set takes KEY=VALUE"),
        ("miner --preset moon", 64, "preset must be one of local, testnet, mainnet"),
        ("miner --config /nowhere.toml", 64, "there is no configuration file /nowhere.toml"),
        ("localnet --miners 2", 64, "must be at least training.num_stages = 3, got 2"),
        ("localnet --stages 7", 64, "training.num_stages must be in [1, model.num_layers = 6], got 7"),
        ("localnet --cheat identity:10", 64, "takes a miner in [1, 9], got 10"),
        ("localnet --cheat identity:0", 64, "takes a miner in [1, 9], got 0"),
        ("localnet --cheat identity", 64, "localnet.cheats in the flags must be a list, each entry text that matches"),
        ("localnet --bottleneck zip", 64, "must be one of resbm, iota, none, k0"),
        ("devnet --port 70000", 64, "devnet.port must be in"),
        ("devnet --set tempi=4", 64, "no 'tempi'; known are"),
        ("devnet --tempo soon", 64, "tempo must be a number, got 'soon'"),
        ("devnet --fund me=4", 64, "devnet.prefunded: 'me' is not an SS58 address"),
        ("devnet --config /nowhere.toml", 64, "configuration file /nowhere.toml cannot be read"),
        ("devnet --fund me", 64, "--fund takes ADDRESS=TAO, got 'me'"),
        ("init-run --netuid 1 --url nonsense", 64, "node.url in the flags must be text that matches"),
        ("devnet explode", 2, "No such command 'explode'"),
        ("miner --nonsense 1", 2, "No such option: --nonsense"),
        ("mine", 2, "No such command 'mine'"),
        ("init-run --netuid 1", 2, "Missing option '--url'"),
    ],
)
def test_a_mistake_is_named_and_nothing_starts(
    line: str, code: int, text: str, received: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed(line) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err
    assert not received


def test_localnet_takes_its_flags_over_the_local_preset(
    received: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BT_NETWORK", "finney")
    assert typed("localnet") == 0
    assert typed(
        "localnet --miners 4 --validators 1 --stages 2 --epochs 3 --seed 5 --dir /d --bottleneck k0 "
        "--cheat identity:1 --cheat zero-upload:3 --virtual --port-base 20000 --set audit.probability=0.5"
    ) == 0  # fmt: skip
    (plain, defaults), (config, options) = received
    assert isinstance(plain, NodeConfig) and isinstance(config, NodeConfig)
    assert defaults == LocalnetOptions()
    assert plain.node.network == "local"
    assert (plain.run.training.min_miners, plain.run.training.min_validators) == (9, 2)
    assert isinstance(options, LocalnetOptions)
    assert (options.num_miners, options.num_validators, options.seed, options.port_base) == (4, 1, 5, 20000)
    assert (options.directory, options.is_virtual) == ("/d", True)
    assert options.cheat_of == {1: "identity", 3: "zero-upload"}
    run = config.run
    assert (run.training.num_stages, run.training.num_epochs) == (2, 3)
    assert (run.training.min_miners, run.training.min_validators) == (4, 1)
    assert (run.model.bottleneck, run.model.seed, run.corpus.seed, run.audit.probability) == (Bottleneck.K0, 5, 5, 0.5)
    assert plain.run != RunConfig()


def fault_of_yuma(*arguments: object) -> int:
    raise KeyError("oops")


def test_a_fault_of_ours_is_told_apart_from_a_check_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(commands.ENTRIES, "yuma", f"{__name__}:fault_of_yuma")
    assert typed("yuma weights.json") == ExitCode.UNEXPECTED
    assert "a fault of Strata: KeyError: 'oops'" in capsys.readouterr().err
    assert "KeyError: 'oops'" in caplog.text


def test_other_commands_hand_on_what_was_said(received: list[tuple[object, ...]]) -> None:
    assert typed("audit some/dir") == 0
    assert typed("init-run --netuid 3 --url http://h:1 --run-id r") == 0
    assert received[0] == ("some/dir", None, None, False, 0, None)
    assert received[1][1:] == ("http://h:1", "r")
    assert typed("audit some/dir --replay 3") == 0
    assert typed("explain 5abc") == 0
    assert typed("agreement some/dir --epoch 2 --png a.png") == 0
    assert typed("clasp some/dir --epoch 2 --png c.png") == 0
    assert typed("simulate --config c.toml --set audit.probability=0.2 --sweep gamma=5,10 --epochs 9") == 0
    assert received[2:] == [
        ("some/dir", None, None, False, 3, None),
        ("5abc", "localnet", None, None),
        ("some/dir", 2, "a.png"),
        ("some/dir", 2, "c.png"),
        (
            {"simulate.num_epochs": "9", "simulate.sweep": "gamma=5,10"},
            {"audit.probability": "0.2"},
            None,
            "c.toml",
        ),
    ]


def test_the_chains_commands_hand_on_what_was_said(
    received: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert typed("devnet --port 0 --block-time 0.5 --subnets 2 --tempo 40 --set immunity_period=9") == 0
    assert typed("yuma weights.json --epochs 3 --plot a.svg") == 0
    monkeypatch.setenv("STRATA_NETUID", "7")
    assert typed("chain -n ws://127.0.0.1:9944") == 0
    (devnet,), yuma, (node,) = received
    assert isinstance(devnet, DevnetConfig) and isinstance(node, NodeSettings)
    assert (devnet.port, devnet.block_time_s, [subnet.netuid for subnet in devnet.subnets]) == (0, 0.5, [1, 2])
    assert devnet.subnets[1].hyperparameters == {"tempo": 40, "immunity_period": 9}
    assert yuma == ("weights.json", 3, "a.svg")
    assert (node.netuid, node.endpoint) == (7, "ws://127.0.0.1:9944")


def test_a_role_file_runs_as_its_command(received: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["neurons/miner.py", "--netuid", "4"])
    with pytest.raises(SystemExit):
        cli.main_as("miner")
    (config,) = received[0]
    assert isinstance(config, NodeConfig)
    assert config.node.netuid == 4


def test_version_names_what_a_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("version") == 0
    assert re.fullmatch(r"strata \S+, protocol \d+\npython \S+, torch \S+, bittensor \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(f"{command} --help") == 0
    shown = capsys.readouterr().out
    assert command == "version" or f"\n  strata {command}" in shown


def test_the_list_of_commands_is_readable_and_explains_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert typed("--help") == 0
    shown = capsys.readouterr().out
    assert shown.count("...") == 1, "a summary is cut short: it must fit its line"
    for code in ExitCode:
        assert re.search(rf"^ +{code.value}  ", shown, re.MULTILINE)


@pytest.mark.parametrize("command", sorted(commands.ENTRIES))
def test_every_command_leads_somewhere(command: str) -> None:
    module, name = commands.ENTRIES[command].split(":")
    assert callable(getattr(import_module(module), name))


def _printed_commands() -> Iterator[tuple[str, str, bool]]:
    """Where, what stands after `strata`, and whether it is a line to be typed and not a word in a sentence."""
    guides = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    documents = [*guides, *sorted((ROOT / "deploy").rglob("*.*"))]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in documents}
    texts |= {f"strata {name} --help": command.help for name, command in COMMANDS.items()}
    for where, text in texts.items():
        for line in re.findall(r"^[ $\"]*(?:\S*/)?strata ((?:[a-z-]+)\b.*)$", text, re.MULTILINE):
            yield where, line, "`" not in line
        for line in re.findall(r"`strata ([a-z][^`]*)`", text):
            yield where, line, False


def test_every_command_that_a_text_prints_exists() -> None:
    found = list(_printed_commands())
    assert len(found) > 100
    for where, line, is_typed in found:
        name, *rest = re.split(r"\s{3,}(?![-\s])|\s+#|\.\.\.|`", line)[0].split()
        assert name in COMMANDS, f"{where}: strata {line}"
        command = COMMANDS[name]
        if name == "devnet" and rest and not rest[0].startswith("-"):
            command = command.get_command(None, rest.pop(0))
            assert command is not None, f"{where}: strata {line}"
        known = {flag for option in command.params for flag in option.opts} | {"--help", "-h"}
        flags = {word.split("=")[0] for word in rest if re.match(r"--?[A-Za-z]", word)}
        assert flags <= known, f"{where}: strata {line}"
        if is_typed and "--help" not in rest:
            command.make_context(name, rest)  # raises what typing it would


@pytest.mark.parametrize(
    ("kind", "pattern"), [("pipeline", r"Default: (\d+|resbm)"), ("blocktrain", r"for blocktrain (\d+)")]
)
def test_the_defaults_that_help_names_are_those_of_a_local_subnet(
    kind: str, pattern: str, received: list[tuple[object, ...]]
) -> None:
    assert typed(f"localnet --kind {kind}") == 0
    config, options = received[0]
    assert isinstance(config, NodeConfig) and isinstance(options, LocalnetOptions)
    tables = {"localnet": options, "training": config.run.training, "model": config.run.model}
    named = [(flag.key, said[1]) for flag in cli._LOCALNET if (said := re.search(pattern, flag.help))]
    assert len(named) >= 3
    for key, default in named:
        table, _, name = key.partition(".")
        assert default == str(getattr(tables[table], name)), key


def test_devnet_serves_until_it_is_told_to_stop() -> None:
    line = [sys.executable, "-m", "neurons.cli", "devnet", "--port", "0", "--block-time", "0.5"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert "devnet listens on ws://127.0.0.1:" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == ExitCode.OK
    assert "strata devnet stopped (SIGTERM); lost: nothing" in stderr
