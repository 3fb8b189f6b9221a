"""What CLASP says of each miner, from the record: as numbers and as a picture."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from incentives.config import ClaspConfig
from incentives.power import samples_to_find
from neurons import attribution
from neurons.attribution import effects, samples_for
from neurons.exit_codes import ExitCode
from neurons.flagging import find_flags, open_window
from subnet.config import RunConfig, RunKind, config_bytes
from subnet.orchestration.ledger import EpochPublished
from subnet.types import Epoch
from tests.unit.recorded import A, B, Book, C, D, ref

CLASP = ClaspConfig()


def book(harm: float, *, num_epochs: int = 2) -> Book:
    """120 samples an epoch over two stages of two; A's lose `harm` nats more."""
    rng, made = np.random.default_rng(1), Book()
    for epoch in range(num_epochs):
        for sample in range(120):
            hops = ((A, B)[sample % 2], (C, D)[sample // 2 % 2])
            made.sample(epoch, sample, *hops, loss=4.0 + 0.1 * float(rng.standard_normal()) + harm * (hops[0] == A))
        made.say(EpochPublished(epoch=Epoch(epoch), snapshots=(ref("a"), ref("b")), participants=()))
    return made.seal()


def test_each_miner_has_its_effect_and_the_flagged_are_those_of_the_record() -> None:
    accounts = book(0.3).record().accounts
    window = open_window(accounts, Epoch(1), CLASP)
    assert window is not None
    assert window.epochs == (0, 1)
    found = effects(window, CLASP)
    assert [(one.stage, one.hotkey, one.num_samples) for one in found] == [
        (0, A, 120),
        (0, B, 120),
        (1, C, 120),
        (1, D, 120),
    ]
    bad, mate, *_ = found
    assert bad.effect == pytest.approx(0.3, abs=0.05)
    assert bad.mean_loss - mate.mean_loss == pytest.approx(bad.effect, abs=1e-6)
    assert bad.z > bad.limit > mate.z
    assert [one.hotkey for one in found if one.is_flagged] == [A]
    assert [flag.hotkey for flag in find_flags(accounts, Epoch(1), CLASP)] == [A]


def test_nothing_published_is_no_window() -> None:
    assert open_window(book(0.0, num_epochs=0).record().accounts, Epoch(0), CLASP) is None


def test_where_stages_train_apart_no_loss_is_shared_and_nobody_is_judged() -> None:
    apart = msgspec.structs.replace(RunConfig(), kind=RunKind.BLOCKTRAIN)
    accounts = book(0.3).record().accounts
    assert accounts.created is not None
    accounts.created = msgspec.structs.replace(accounts.created, config_json=config_bytes(apart).decode())
    assert open_window(accounts, Epoch(1), CLASP) is None
    assert find_flags(accounts, Epoch(1), CLASP) == ()


def test_the_samples_that_a_harm_takes_follow_from_the_noise_of_this_run() -> None:
    window = open_window(book(0.0).record().accounts, Epoch(1), CLASP)
    assert window is not None
    first = [one for one in effects(window, CLASP) if one.stage == 0]
    # the noise drawn is .1, and error^2 is sigma^2 * M^2 / (T(M-1)) and what miners may wander by
    error = math.sqrt(0.1**2 * 4 / 240 + CLASP.wander**2)
    expected = samples_to_find(error * math.sqrt(240 / 4), CLASP.effect, 2, num_stages=2, alpha=CLASP.alpha)
    assert samples_for(first, 2, CLASP) == pytest.approx(expected, rel=0.35)
    assert math.isinf(samples_for(first[:1], 2, CLASP))


def test_the_command_prints_each_stage_and_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = book(0.3)

    async def read(target: str) -> list[bytes]:
        return made.segments

    monkeypatch.setattr(attribution, "read_segments", read)
    picture = tmp_path / "c.png"
    assert attribution.run_clasp("somewhere", png=str(picture)) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "epochs 0 to 1, 240 samples, condition of the pathways" in shown
    assert f"flagged: {A}" in shown
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert attribution.run_clasp("somewhere", epoch=0) == ExitCode.OK
    assert "epochs 0 to 0, 120 samples" in capsys.readouterr().out
    made = book(0.0, num_epochs=0)
    assert attribution.run_clasp("somewhere") == ExitCode.OK
    assert "no epoch is published yet" in capsys.readouterr().out


def test_an_ill_conditioned_design_is_shown_and_flags_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def read(target: str) -> list[bytes]:
        made = Book()
        for sample in range(60):
            made.sample(
                0, sample, (A, B)[sample % 2], (C, D)[sample % 2], loss=4.0 + (sample % 2) + 0.01 * (sample % 7)
            )
        return made.say(EpochPublished(epoch=Epoch(0), snapshots=(ref("a"), ref("b")), participants=())).seal().segments

    monkeypatch.setattr(attribution, "read_segments", read)
    assert attribution.run_clasp("somewhere") == ExitCode.OK
    shown = capsys.readouterr().out
    assert "over 100: nobody is flagged" in shown
    assert "flagged: none" in shown
