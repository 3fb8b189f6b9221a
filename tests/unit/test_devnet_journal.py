"""The chain's file: what was written comes back, a torn end is cut off, another chain's file is refused."""

from pathlib import Path

import pytest

from subnet.devnet import journal as journal_module
from subnet.devnet.chain import Chain
from subnet.devnet.config import DevnetConfig
from subnet.devnet.journal import FILE_NAME, Journal
from subnet.errors import StartupRefused


def grown(directory: Path, config: DevnetConfig, *, blocks: int) -> tuple[Chain, Journal]:
    """A chain kept in `directory`, restored or begun, and some blocks longer."""
    chain, journal = Chain(config), Journal(directory, config)
    if not journal.restore(chain):
        journal.block(chain, chain.start(now_ms=1_000))
    for _ in range(blocks):
        block, _ = chain.author(now_ms=1_000 + 12_000 * (chain.head.number + 1))
        journal.block(chain, block)
    return chain, journal


def test_a_restored_chain_is_the_same_to_the_hash_and_goes_on(tmp_path: Path) -> None:
    config = DevnetConfig()
    first, journal = grown(tmp_path, config, blocks=30)
    first.undo(1)
    journal.undo(1)
    journal.close()
    second, journal = grown(tmp_path, config, blocks=0)
    assert second.head.digest == first.head.digest and second.hashes == first.hashes
    assert second.state.everything() == first.state.everything()
    assert second.storage(second.block_hash(20)).get("LastEpochBlock", 1) == 20
    journal.close()
    third, journal = grown(tmp_path, config, blocks=3)
    journal.close()
    assert third.head.number == 32 and third.block_hash(29) == first.block_hash(29)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_end_costs_the_last_block_only(tmp_path: Path, cut: int) -> None:
    config = DevnetConfig()
    _, journal = grown(tmp_path, config, blocks=10)
    journal.close()
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:-cut])
    chain, journal = grown(tmp_path, config, blocks=0)
    assert chain.head.number == 9
    journal.close()
    chain, journal = grown(tmp_path, config, blocks=2)
    journal.close()
    assert chain.head.number == 11


def test_a_damaged_record_ends_the_file(tmp_path: Path) -> None:
    config = DevnetConfig()
    _, journal = grown(tmp_path, config, blocks=10)
    journal.close()
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(bytes(data))
    chain, journal = grown(tmp_path, config, blocks=0)
    journal.close()
    assert chain.head.number == 9


def test_a_file_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    _, journal = grown(tmp_path, DevnetConfig(), blocks=2)
    journal.close()
    before = (tmp_path / FILE_NAME).read_bytes()
    with pytest.raises(StartupRefused, match="other settings"):
        grown(tmp_path, DevnetConfig(block_time_s=1.0), blocks=0)
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_large_file_is_rewritten_from_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_ABOVE_BYTES", 20_000)
    config = DevnetConfig()
    chain, journal = grown(tmp_path, config, blocks=200)
    journal.close()
    assert (tmp_path / FILE_NAME).stat().st_size < 60_000
    again, journal = grown(tmp_path, config, blocks=1)
    journal.close()
    assert again.block_hash(200) == chain.head.digest and again.block_hash(3) == chain.block_hash(3)
    assert again.storage(chain.head.digest).get("LastEpochBlock", 1) == 200
