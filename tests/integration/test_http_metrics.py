"""What a scrape shows."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from neurons.observe import frame_measures
from subnet.adapters.blobs import HttpBlobs
from subnet.adapters.http_client import open_session
from subnet.adapters.http_server import mount_status
from subnet.adapters.listener import Listener
from subnet.adapters.metrics import Measure, renderer
from subnet.adapters.peers import PeerCounters


async def test_a_scrape_shows_what_the_role_counts_now() -> None:
    counters = PeerCounters()

    def read() -> Iterator[Measure]:
        yield Measure(name="strata_miners", text="Live miners.", value=3, labels={"stage": "0"})
        yield Measure(name="strata_miners", text="Live miners.", value=2, labels={"stage": "1"})
        yield from frame_measures(counters)

    listener = Listener()
    mount_status(listener, health=dict, metrics=renderer("miner", "0.1.0", read))
    await listener.start("127.0.0.1", 0)
    counters.payload_bytes_sent, counters.frames_refused = 4096, 2
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
    assert samples["strata_miners", "0"] == 3
    assert samples["strata_miners", "1"] == 2
    assert samples["strata_process_resident_memory_bytes",] > 1 << 20
