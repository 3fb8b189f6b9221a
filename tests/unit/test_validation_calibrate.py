"""Honest noise on this machine, as a validator measures it at its start."""

import msgspec

from neurons.roles.noise import own_noise
from neurons.settings import load
from subnet.adapters.memory import MemoryDisk
from subnet.config import RunConfig
from subnet.model.partition import num_elements
from subnet.sim.compute import SimCompute
from subnet.sim.loop import VirtualClock, run
from subnet.types import Noise, NumericMode, StageIndex
from subnet.validation.calibrate import (
    MAX_PARAMS,
    MAX_TOKENS,
    decode_noise,
    encode_noise,
    measure_noise,
    noise_name,
    reference_config,
)
from tests.numerics.support import PatternCorpus, small_config

FP32, BF16 = NumericMode.FP32, NumericMode.BF16_AUTOCAST


def allowing(*modes: NumericMode) -> RunConfig:
    config = small_config()
    return msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, modes=modes))


def figures(noise: Noise) -> list[float]:
    return [noise.rel_d, noise.rel_d_token, noise.rel_d_backward, noise.rel_d_backward_token, noise.rel_dw]


def test_one_mode_against_itself_is_silent() -> None:
    config = allowing(FP32)
    found = measure_noise(config, PatternCorpus(config), FP32)
    assert figures(found) == [0.0] * 5 and found.loss_error == found.distance == 0.0
    assert (found.mode, found.machine.startswith("torch ")) == (FP32, True)


def test_across_modes_there_is_noise_well_below_the_limits() -> None:
    config = allowing(FP32, BF16)
    for mode in (FP32, BF16):
        found = measure_noise(config, PatternCorpus(config), mode)
        assert found.mode is mode
        assert all(figure > 0 for figure in figures(found))
        assert found.distance == max(found.rel_d, found.rel_d_backward)
        assert 3 * found.distance < config.audit.max_rel_d
        assert found.rel_d_token < config.audit.max_rel_d_token
        assert found.rel_dw < config.audit.max_rel_dw
        assert found.loss_error < config.audit.max_loss_error


def test_a_large_model_is_measured_narrower_and_as_deep() -> None:
    main = load(preset="mainnet", environment={}).run
    reference = reference_config(main)
    sizes = [num_elements(reference, StageIndex(stage)) for stage in range(main.training.num_stages)]
    assert sum(sizes) <= MAX_PARAMS
    assert reference.training.microbatch_size * reference.training.num_tokens <= MAX_TOKENS
    assert reference.training.num_tokens == main.training.num_tokens
    assert (reference.training.num_stages, reference.model.num_layers) == (4, main.model.num_layers)
    assert reference.model.width == 64 * reference.model.bottleneck_width < main.model.width
    small = small_config()
    assert reference_config(small) == small


def test_a_width_that_cannot_be_halved_stays() -> None:
    odd = small_config(num_layers=4)
    wide = msgspec.structs.replace(odd.model, width=4098, num_heads=3, num_kv_heads=3, bottleneck_width=1)
    config = msgspec.structs.replace(odd, model=wide)
    assert reference_config(config) == config


def test_what_was_measured_is_kept_for_the_same_machine_mode_and_run() -> None:
    config = allowing(FP32, BF16)
    other = allowing(FP32)
    assert noise_name(config, FP32) == noise_name(config, FP32)
    assert len({noise_name(config, FP32), noise_name(config, BF16), noise_name(other, FP32)}) == 3


def test_a_file_of_another_kind_is_measured_anew() -> None:
    noise = measure_noise(allowing(FP32), PatternCorpus(allowing(FP32)), FP32)
    assert decode_noise(encode_noise(noise)) == noise
    for damaged in (b"", b"{}", b"\xff"):
        assert decode_noise(damaged) is None


def test_a_validator_measures_once_and_reads_from_then_on() -> None:
    config = allowing(FP32, BF16)
    disk = MemoryDisk()

    async def twice() -> tuple[Noise, float, Noise, float]:
        clock = VirtualClock()
        compute = SimCompute(seconds_per_call=1.0, seed=0, name="v", clock=clock)
        corpus = PatternCorpus(config)
        began = clock.now()
        first = await own_noise(config, FP32, disk=disk, corpus=corpus, compute=compute)
        measured_at = clock.now()
        again = await own_noise(config, FP32, disk=disk, corpus=corpus, compute=compute)
        return first, measured_at - began, again, clock.now() - measured_at

    first, cost, again, later = run(twice())
    assert first == again
    assert cost > 0.0 and later == 0.0
    assert run(disk.names()) == [noise_name(config, FP32)]
