"""Stages that train apart, as real processes over HTTP: the same bits as in virtual time, and bytes as the protocol says."""

import json
from collections.abc import Iterator
from pathlib import Path

import bittensor as bt
import msgspec
import pytest
import torch

from neurons.exit_codes import ExitCode
from neurons.scoring import Record
from neurons.virtual import VirtualPlan, run_virtual
from subnet.adapters.auth import KeypairSigner
from subnet.adapters.corpus import make_corpus
from subnet.config import RunConfig
from subnet.orchestration.ledger import Assigned
from subnet.orchestration.rounds import participation
from subnet.types import Digest
from tests.integration.test_localnet import Localnet

MINERS = ("m1", "m2", "m3")
START_EVERY_S = 2.0


def record_of(net: Localnet) -> Record:
    """The sealed record, as the orchestrator's store holds it."""
    record = Record()
    for path in sorted((net.directory / "nodes" / "orchestrator" / "blobs" / "runs").glob("*/ledger/*")):
        record.add(path.read_bytes())
    return record


def published(record: Record) -> list[list[Digest]]:
    """Digests of each epoch's snapshots, by stage."""
    found = [account.snapshots for account in record.accounts.published()]
    return [[ref.digest for ref in epoch.snapshots] for epoch in found if epoch is not None]


def in_virtual_time(net: Localnet, record: Record) -> Record:
    """The same run on a simulated network and chain: same configuration, same keys, joined in the same order."""
    created = record.accounts.created
    assert created is not None
    config = msgspec.json.decode(created.config_json, type=RunConfig)
    wallets = str(net.directory / "wallets")
    signers = {name: KeypairSigner(bt.Wallet("miners", name, wallets).hotkey) for name in MINERS}
    names = {signer.hotkey: name for name, signer in signers.items()}
    joined = [names[entry.fact.hotkey] for entry in record.entries if isinstance(entry.fact, Assigned)]
    plan = VirtualPlan(
        num_miners=len(MINERS),
        num_validators=1,
        signers=signers,
        late_s={name: START_EVERY_S * place for place, name in enumerate(joined)},
    )
    return run_virtual(config, record.incentives(), make_corpus(config), plan).record


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the processes compute; the number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("one_thread")
def test_processes_over_http_publish_what_one_process_does_to_the_bit(tmp_path: Path) -> None:
    """With the objective whose workers also fetch the published params of their neighbours."""
    net = Localnet(
        tmp_path, "--kind", "blocktrain", "--stages", "2", "--miners", "3", "--validators", "1", "--epochs", "2",
        "--set", "training.target_batches=8", "--set", "blocktrain.objective=greedy",
    )  # fmt: skip
    assert net.process.wait(240) == ExitCode.OK, net.text
    net.assert_nothing_is_left()
    record = record_of(net)
    assert [
        [(one.assigned, one.accepted) for one in participation(account)] for account in record.accounts.published()
    ] == [[(1, 1), (2, 2)]] * 2
    assert published(record) == published(in_virtual_time(net, record))
    findings = {found["name"]: found for found in json.loads((net.directory / "report.json").read_text())["findings"]}
    for words in ("to the bit", "what the protocol asks for", "agreeing shards were recomputed"):
        assert next(found for name, found in findings.items() if words in name)["holds"] is True
