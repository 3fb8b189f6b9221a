"""What the orchestrator shows in a browser: the packaged page, and beside the run's public objects the chain's metagraph."""

from importlib.resources import files

from subnet import wire
from subnet.adapters.http_server import PublicReader, mount_public
from subnet.adapters.listener import Listener
from subnet.adapters.page import mount_page
from subnet.ports import Chain


def offer_page(listener: Listener, public: PublicReader, chain: Chain) -> None:
    """Mount the page, and the public objects of which `metagraph` is read from the chain's cache."""

    async def read(name: str) -> bytes | None:
        if name == "metagraph":
            return wire.encode(await chain.metagraph())
        return await public(name)

    mount_public(listener, read)
    mount_page(listener, {item.name: item.read_bytes() for item in (files("subnet.dashboard") / "static").iterdir()})
