"""The agreement matrix from the record's merges, as numbers and as a picture."""

import math
import sys
from pathlib import Path

import pytest

from neurons import agreement, plots
from neurons.agreement import collusions, comparisons, stage_agreements
from neurons.exit_codes import ExitCode
from subnet.errors import StartupRefused
from subnet.orchestration.ledger import ShardMerged
from subnet.types import Digest, Epoch, Hotkey, StageIndex
from tests.unit.recorded import A, B, Book, C, D, ref

E = Hotkey("5E" + "x" * 46)


def shard(
    number: int,
    pair: tuple[Hotkey, ...],
    reported: tuple[str, ...],
    *,
    stage: int = 0,
    epoch: int = 0,
    size_bytes: int = 4,
) -> ShardMerged:
    return ShardMerged(
        epoch=Epoch(epoch),
        stage=StageIndex(stage),
        shard=number,
        reducers=pair,
        reported=tuple(Digest(name) for name in reported),
        accepted=ref("x", size_bytes),
        is_refereed=len(set(reported)) > 1,
    )


SHARDS = (
    shard(0, (A, B), ("1", "1")),
    shard(1, (A, C), ("1", "2")),
    shard(2, (B, C), ("1", "2")),
    shard(3, (A, D), ("1", "")),
    shard(4, (B, D), ("", ""), size_bytes=0),
    shard(5, (C, D), ("9", "1")),
    shard(0, (E,), ("1",), stage=1),
    shard(0, (A, B), ("1", "1"), epoch=1),
)


def test_what_was_not_compared_is_no_disagreement() -> None:
    assert [(one.pair, one.is_equal) for one in comparisons(SHARDS[:7])] == [
        ((A, B), True),
        ((A, C), False),
        ((B, C), False),
        ((C, D), False),
    ]


def test_the_cheat_is_the_row_out_of_consensus() -> None:
    accounts = Book().say(*SHARDS).seal().record().accounts
    (first, matrix), (second, lone) = stage_agreements(accounts)
    assert (first.num_shards, first.num_missing, first.num_refereed) == (7, 2, 4)
    assert matrix.out_of_consensus() == (C,)
    assert matrix.agreement(A, B) == 1.0
    assert (second.stage, lone.hotkeys) == (1, ())
    ((_, only_second),) = stage_agreements(accounts, epoch=Epoch(1))
    assert only_second.hotkeys == (A, B)
    assert stage_agreements(accounts, epoch=Epoch(7)) == []


def test_the_command_prints_the_matrix_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Book().say(*SHARDS).seal()

    async def read(target: str) -> list[bytes]:
        return book.segments

    monkeypatch.setattr(agreement, "read_segments", read)
    picture = tmp_path / "a.png"
    assert agreement.run_agreement("somewhere", png=str(picture)) == ExitCode.OK
    shown = capsys.readouterr().out
    assert f"out of consensus: {C}" in shown
    assert "7 shards: 4 recomputed by the referee, 2 with a copy missing" in shown
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert agreement.run_agreement("somewhere", epoch=0) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "if 2 of 4 miners fail, 83.3% of shards keep a reducer" in shown
    assert "2 colluders share 1 of the shards (16.7%) and agree there" in shown
    assert "finds them with 8.0% an epoch, 95 % within 36" in shown
    assert agreement.run_agreement("somewhere", epoch=5) == ExitCode.OK
    assert "nothing was merged in epoch 5" in capsys.readouterr().out


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(StartupRefused, match="-m pip install matplotlib"):
        plots.new_figure(1.0, 1.0)


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupRefused, match="cannot be written"):
        plots.save(plots.new_figure(1.0, 1.0), str(tmp_path / "no" / "a.png"))


def test_the_odds_of_colluders_follow_from_the_stage_and_the_audits() -> None:
    assert collusions(1, 0.08) == []
    (pair,) = collusions(3, 0.08)
    assert (pair.num_colluders, pair.num_shards, pair.share) == (2, 1, 1 / 3)
    assert pair.found == pytest.approx(0.08)
    few, third = collusions(30, 0.08)
    assert (few.num_shards, third.num_colluders, third.num_shards) == (1, 10, 45)
    assert third.share == pytest.approx(90 / 870)
    assert third.found == pytest.approx(1 - 0.92**45)
    assert few.epochs == pytest.approx(35.9, abs=0.1)
    assert third.epochs == 1.0
    assert [one.epochs for one in collusions(30, 0.0)] == [math.inf, math.inf]
