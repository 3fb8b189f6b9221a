"""What a scrape of each role shows."""

from prometheus_client.parser import text_string_to_metric_families

from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.http_client import open_session
from subnet.adapters.http_server import mount_status
from subnet.adapters.listener import Listener
from subnet.adapters.metrics import MinerMetrics, OrchestratorMetrics, ValidatorMetrics, new_registry, renderer
from subnet.adapters.peers import PeerCounters
from subnet.types import Outcome, Phase


async def test_a_scrape_shows_every_role_in_names_with_a_prefix() -> None:
    registry, counters = new_registry("miner", "0.1.0"), PeerCounters()
    orchestrator, miner, validator = (
        OrchestratorMetrics(registry),
        MinerMetrics(registry, counters),
        ValidatorMetrics(registry),
    )
    counters.payload_bytes_sent, counters.frames_refused = 4096, 2
    orchestrator.set_phase(Phase.MERGING)
    orchestrator.miners.labels("0").set(3)
    miner.passes.labels("forward").inc(5)
    validator.verdicts.labels(Outcome.PASS.value).inc()
    listener = Listener()
    mount_status(listener, health=dict, metrics=renderer(registry))
    await listener.start("127.0.0.1", 0)
    async with open_session() as session:
        text = await HttpBlobs(session).get(f"http://127.0.0.1:{listener.port}/metrics", limit_bytes=1 << 20)
    await listener.stop()
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert all(name[0].startswith("strata_") for name in samples)
    assert samples["strata_frame_bytes_total", "payload", "sent"] == 4096
    assert samples["strata_frames_total", "refused"] == 2
    assert samples["strata_phase", "merging"] == 1
    assert samples["strata_phase", "training"] == 0
    assert samples["strata_miners", "0"] == 3
    assert samples["strata_passes_total", "forward"] == 5
    assert samples["strata_verdicts_total", "pass"] == 1
    assert samples["strata_verdicts_total", "fail"] == 0
    assert samples["strata_process_resident_memory_bytes",] > 1 << 20
