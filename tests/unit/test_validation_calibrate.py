"""Honest noise on this machine, as a validator measures it at its start."""

import msgspec

from subnet.types import NumericMode
from subnet.validation.calibrate import Noise, measure_noise, measure_noise_across_modes
from tests.numerics.support import PatternCorpus, small_config


def test_one_mode_against_itself_is_silent() -> None:
    config = small_config()
    one = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, modes=(NumericMode.FP32,)))
    found = measure_noise_across_modes(one, PatternCorpus(one), num_segments=1)
    assert found == Noise(
        rel_d=0.0, rel_d_token=0.0, rel_d_backward=0.0, rel_d_backward_token=0.0, rel_dw=0.0, loss_error=0.0
    )


def test_across_modes_the_worst_direction_counts_and_stays_below_the_limits() -> None:
    config = small_config()
    corpus = PatternCorpus(config)
    fp32, bf16 = NumericMode.FP32, NumericMode.BF16_AUTOCAST
    there = measure_noise(config, corpus, made_in=fp32, replayed_in=bf16, num_segments=2)
    back = measure_noise(config, corpus, made_in=bf16, replayed_in=fp32, num_segments=2)
    both = measure_noise_across_modes(config, corpus, num_segments=2)
    assert both.rel_d == max(there.rel_d, back.rel_d) > 0
    assert both.rel_dw == max(there.rel_dw, back.rel_dw)
    assert both.rel_d < config.audit.max_rel_d
    assert both.rel_d_token < config.audit.max_rel_d_token
    assert both.rel_dw < config.audit.max_rel_dw
    assert both.loss_error < config.audit.max_loss_error
