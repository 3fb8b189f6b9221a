import msgspec
import pytest

from incentives.config import Decay, IncentiveConfig, OnNoCredit
from subnet.errors import InvalidConfig


def read(text: str) -> IncentiveConfig:
    return msgspec.json.decode(text, type=IncentiveConfig)


def test_the_defaults_are_those_of_the_design() -> None:
    config = IncentiveConfig()
    assert (config.decay, config.on_no_credit) == (Decay.EXPONENTIAL, OnNoCredit.NONE)
    assert config.window_epochs == config.ramp_epochs == 30
    assert (config.trust_floor, config.ban_epochs, config.rate_cap, config.burn_share) == (0.25, 216, 1.5, 0.0)


@pytest.mark.parametrize(
    ("gamma", "period", "window"), [(10.0, 20.0, 30), (1.0, 60.0, 1), (1.0, 40.0, 2), (1.0, 7.0, 9)]
)
def test_the_window_is_gamma_over_the_sync_period(gamma: float, period: float, window: int) -> None:
    assert IncentiveConfig(gamma_hours=gamma, sync_period_minutes=period).window_epochs == window


def test_probation_may_differ_from_the_window() -> None:
    assert IncentiveConfig(probation_epochs=5).ramp_epochs == 5


def test_a_window_shorter_than_an_epoch_is_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"gamma_hours must be at least .* = 61.0 minutes, got 1.0 hours"):
        IncentiveConfig(gamma_hours=1.0, sync_period_minutes=61.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"gama_hours": 3}', "gama_hours"),
        ('{"trust_floor": 1.5}', r"<= 1\.0 - at `\$\.trust_floor`"),
        ('{"rate_cap": 0.5}', r">= 1\.0 - at `\$\.rate_cap`"),
        ('{"ban_epochs": "many"}', r"`int`, got `str` - at `\$\.ban_epochs`"),
        ('{"decay": "linear"}', r"'linear' - at `\$\.decay`"),
        ('{"burn_share": -0.1}', r">= 0\.0 - at `\$\.burn_share`"),
        ('{"gamma_hours": 0}', r"> 0\.0 - at `\$\.gamma_hours`"),
    ],
)
def test_a_bad_knob_is_named_with_its_range(text: str, words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=words):
        read(text)
