"""What a validator knows of its machine's honest noise: measured once, kept on its disk (trust.md 2)."""

import logging

from subnet.config import REL_D_LIMITS, RunConfig
from subnet.ports import Compute, Corpus, Disk
from subnet.types import Noise, NumericMode
from subnet.validation.calibrate import decode_noise, encode_noise, measure_noise, noise_name

log = logging.getLogger("strata.validator")


async def own_noise(config: RunConfig, mode: NumericMode, *, disk: Disk, corpus: Corpus, compute: Compute) -> Noise:
    """The noise of this machine when it replays in `mode`, from the disk where it stands there already."""
    name = noise_name(config, mode)
    data = await disk.read(name)
    known = decode_noise(data) if data is not None else None
    if known is not None:
        return known
    log.info("measuring the noise of this machine", extra={"mode": mode})
    noise = await compute.run(lambda: measure_noise(config, corpus, mode))
    await disk.write(name, encode_noise(noise))
    log.info("noise measured", extra={"mode": mode, "machine": noise.machine, "distance": noise.distance})
    if noise.distance > REL_D_LIMITS[1]:
        log.warning(
            "this machine is too noisy to audit: try another mode, or another build of torch",
            extra={"mode": mode, "distance": noise.distance, "limit": REL_D_LIMITS[1]},
        )
    return noise
