"""A small run's record made by hand: three miners in three stages, one validator, two epochs, each sealed."""

from collections.abc import Callable

import msgspec

from incentives.config import IncentiveConfig
from neurons.checks import History
from subnet import receipts, wire
from subnet.adapters.auth import KeypairSigner
from subnet.config import ModelConfig, RunConfig, TrainingConfig, config_bytes
from subnet.frames import digest
from subnet.orchestration.ledger import (
    AnyFact,
    CaseClosed,
    Committed,
    Credited,
    EpochPublished,
    EpochStarted,
    Evaluated,
    Leased,
    Ledger,
    LossRecorded,
    RootCommitted,
    RunCreated,
    ScoresPosted,
    UploadAccepted,
    VerdictRecorded,
)
from subnet.orchestration.segments import encode_segment
from subnet.types import BlobRef, Digest, Epoch, Hotkey, Metagraph, Neuron, Outcome, SampleId, StageIndex, Uid, Verdict

CONFIG = RunConfig(
    model=ModelConfig(width=64, num_layers=3, num_heads=2, num_kv_heads=2, ffn_width=128, bottleneck_width=1),
    training=TrainingConfig(num_stages=3, num_epochs=2),
)
OWNER = KeypairSigner.from_uri("//owner", deterministic=True)
VALIDATOR = KeypairSigner.from_uri("//v1", deterministic=True)
CONFIRMER = KeypairSigner.from_uri("//v2", deterministic=True)
MINERS = tuple(KeypairSigner.from_uri(f"//m{number}", deterministic=True) for number in (1, 2, 3))
HOTKEYS = tuple(miner.hotkey for miner in MINERS)
NAMES = {OWNER.hotkey: "orchestrator", VALIDATOR.hotkey: "v1"} | {
    hotkey: f"m{number + 1}" for number, hotkey in enumerate(HOTKEYS)
}
LOSSES = (2.0, 1.5)

Change = Callable[[AnyFact], AnyFact | tuple[AnyFact, ...] | None]


def unchanged(fact: AnyFact) -> AnyFact | None:
    return fact


def segments(change: Change = unchanged) -> list[bytes]:
    """The sealed segments; `change` may alter or leave out any fact before it is recorded, or put several in its place."""
    ledger, sealed = Ledger(), list[bytes]()
    history = History(OWNER.hotkey)

    def record(fact: AnyFact) -> None:
        changed = change(fact)
        for one in changed if isinstance(changed, tuple) else (changed,):
            if one is not None:
                ledger.append(one, at_s=1000.0 + ledger.num_entries)

    record(_created())
    for epoch in (Epoch(0), Epoch(1)):
        if epoch:
            record(_posted(history, 0))
        for fact in _epoch(epoch):
            record(fact)
        sealed.append(encode_segment(ledger.seal()))
        history.add(sealed[-1])
    return sealed


def _created() -> RunCreated:
    return RunCreated(
        run_id="run-1",
        config_json=config_bytes(CONFIG).decode(),
        incentives_json=wire.encode(IncentiveConfig()).decode(),
        corpus_digest=digest(b"corpus"),
        snapshots=_snapshots("genesis"),
        num_elements=(10, 10, 10),
        stage_flops=(1, 1, 2),
        beacon="b",
    )


def _snapshots(name: str) -> tuple[BlobRef, ...]:
    digests = [digest(f"{name}-{stage}".encode()) for stage in range(3)]
    return tuple(BlobRef(key=f"k/{content}", digest=content, size_bytes=1) for content in digests)


def _epoch(epoch: Epoch) -> list[AnyFact]:
    facts: list[AnyFact] = [EpochStarted(epoch=epoch, beacon="b", roster=tuple((hotkey,) for hotkey in HOTKEYS))]
    for number in range(4):
        sample = SampleId(number)
        facts.append(Leased(epoch=epoch, sample=sample, attempt=0, hops=HOTKEYS, deadline_s=2000.0))
        facts += [
            Credited(epoch=epoch, sample=sample, stage=StageIndex(stage), hotkey=hotkey)
            for stage, hotkey in enumerate(HOTKEYS)
        ]
        facts.append(LossRecorded(epoch=epoch, sample=sample, loss=2.5))
    commits = [_committed(epoch, hotkey) for hotkey in HOTKEYS]
    facts += commits
    facts.append(RootCommitted(epoch=epoch, root=_root(commits), at_block=5))
    facts += [UploadAccepted(epoch=epoch, hotkey=hotkey) for hotkey in HOTKEYS]
    facts += [VerdictRecorded(verdict=verdict(epoch, hotkey)) for hotkey in HOTKEYS]
    facts += [
        CaseClosed(epoch=epoch, hotkey=hotkey, segment=0, outcome="pass", banned_until=Epoch(-1), at_epoch=epoch)
        for hotkey in HOTKEYS
    ]
    facts.append(EpochPublished(epoch=epoch, snapshots=_snapshots(f"e{epoch}"), participants=()))
    loss = LOSSES[epoch]
    facts.append(Evaluated(epoch=epoch, validator=VALIDATOR.hotkey, loss=loss, loss_wires_zeroed=loss + 0.5))
    return facts


def _committed(epoch: Epoch, hotkey: Hotkey) -> Committed:
    return Committed(
        epoch=epoch,
        hotkey=hotkey,
        num_receipts=8,
        head=digest(hotkey.encode()),
        checkpoints=(),
        num_batches=4,
        upload_digest=digest(b"upload"),
    )


def _root(commits: list[Committed]) -> Digest:
    leaves = [
        receipts.canonical([commit.hotkey, commit.num_receipts, commit.head, commit.upload_digest, commit.checkpoints])
        for commit in sorted(commits, key=lambda commit: commit.hotkey)
    ]
    return receipts.merkle_root(leaves)


def verdict(
    epoch: Epoch, hotkey: Hotkey, outcome: Outcome = Outcome.PASS, *, signer: KeypairSigner = VALIDATOR
) -> Verdict:
    """Signed by the validator, or another."""
    unsigned = Verdict(
        run_id="run-1",
        epoch=epoch,
        hotkey=hotkey,
        segment=0,
        validator=signer.hotkey,
        outcome=outcome,
        reason="near enough" if outcome is Outcome.PASS else "far off",
        published_rule_passes=True,
    )
    return msgspec.structs.replace(unsigned, signature=signer.sign(receipts.verdict_bytes(unsigned)))


def _posted(history: History, segment: int) -> ScoresPosted:
    board = history.boards[segment]
    return ScoresPosted(
        validator=VALIDATOR.hotkey,
        segment=segment,
        ledger_head=board.head,
        scores=board.scores,
        weights=board.weights,
    )


def metagraph(*, earned: float = 1.0) -> Metagraph:
    """Owner, miners and validator registered; each miner has earned something."""
    keys = [OWNER.hotkey, *HOTKEYS, VALIDATOR.hotkey]
    return Metagraph(
        netuid=2,
        at_block=100,
        owner_hotkey=OWNER.hotkey,
        tempo=20,
        neurons=tuple(
            Neuron(
                uid=Uid(uid),
                hotkey=hotkey,
                coldkey="c",
                stake=1000.0 if hotkey == VALIDATOR.hotkey else earned,
                validator_permit=hotkey == VALIDATOR.hotkey,
                registered_at_block=1,
                last_update_block=50,
                is_active=True,
                incentive=0.0,
                dividends=0.0,
                emission=0.0,
            )
            for uid, hotkey in enumerate(keys)
        ),
    )


def discovery(history: History) -> wire.Discovery:
    """What the owner has on chain at the end."""
    roots = [account.root for account in history.record.accounts.epochs.values() if account.root is not None]
    record = history.record
    return wire.Discovery(
        u="http://127.0.0.1:1", r="run-1", v=1, c="0" * 64,
        e=roots[-1].epoch, m=roots[-1].root, n=record.num_segments, s=record.head,
    )  # fmt: skip
