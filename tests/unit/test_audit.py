"""`strata audit` before it has anything to compare: it says what is missing and what to type."""

from pathlib import Path

import pytest

from neurons import settings
from neurons.audit import run_audit
from neurons.exit_codes import ExitCode
from neurons.local.chain import make_genesis, write_genesis
from neurons.local.keys import create_wallets
from neurons.local.plan import Layout, make_plan
from subnet.errors import StartupRefused
from tests.unit.small_record import segments


def local_subnet(root: Path) -> Layout:
    plan = make_plan(*settings.load_localnet({"localnet.directory": str(root)}, environment={}))
    write_genesis(plan.layout, make_genesis(plan, create_wallets(plan)))
    return plan.layout


def refused(target: str, chain: str | None = None) -> StartupRefused:
    with pytest.raises(StartupRefused) as error:
        run_audit(target, chain)
    return error.value


def test_a_directory_without_a_local_subnet(tmp_path: Path) -> None:
    error = refused(str(tmp_path))
    assert error.exit_code == ExitCode.FOREIGN_DIRECTORY
    assert "strata localnet --dir" in str(error)


def test_a_run_whose_first_epoch_has_not_ended(tmp_path: Path) -> None:
    layout = local_subnet(tmp_path)
    error = refused(str(layout.root))
    assert (error.exit_code, "has no sealed segment yet" in str(error)) == (ExitCode.CHECK_FAILED, True)


def test_a_chain_that_is_gone_or_does_not_answer(tmp_path: Path) -> None:
    layout = local_subnet(tmp_path)
    ledger = layout.runs / "run-1" / "ledger"
    ledger.mkdir(parents=True)
    for index, data in enumerate(segments()):
        (ledger / f"{index:06d}").write_bytes(data)
    gone = refused(str(layout.root))
    assert (gone.exit_code, "name the chain with --chain" in str(gone)) == (ExitCode.DAMAGED_STATE, True)
    silent = refused(str(layout.root), chain="ws://127.0.0.1:9")
    assert (silent.exit_code, "the chain cannot be reached" in str(silent)) == (ExitCode.CHAIN_UNREACHABLE, True)


def test_a_url_needs_a_subnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATA_NETUID", raising=False)
    error = refused("http://127.0.0.1:9")
    assert (error.exit_code, "--netuid N" in str(error)) == (ExitCode.INVALID_CONFIG, True)
