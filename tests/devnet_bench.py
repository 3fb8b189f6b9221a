"""A devnet chain without its server: signed calls go straight into the pool, blocks are made by hand."""

import functools
from collections.abc import Mapping
from typing import Any

from bittensor.keyfiles import Keypair

from subnet.devnet.chain import Block, Chain
from subnet.devnet.config import DevnetConfig, SubnetGenesis
from subnet.devnet.context import Context
from subnet.devnet.extrinsics import Extrinsic

NETUID = 1


@functools.cache
def keypair(name: str) -> Keypair:
    return Keypair.create_from_uri(f"//{name}")


def address(name: str) -> str:
    return str(keypair(name).ss58_address)


class Bench:
    """One chain; `send` returns the name of the runtime's refusal, or None when the call worked."""

    def __init__(self, funded: Mapping[str, float] | None = None, /, **knobs: int) -> None:
        genesis = SubnetGenesis(netuid=NETUID, hyperparameters={"burn_increase_mult": 1 << 64, **knobs})
        prefunded = {address(name): tao for name, tao in (funded or {"Bank": 100_000.0}).items()}
        self.config = DevnetConfig(subnets=(genesis,), prefunded=prefunded, finality_lag=4)
        self.chain = Chain(self.config)
        self.now_ms = 1_000_000
        self.chain.start(now_ms=self.now_ms)

    def signed(
        self, signer: str, pallet: str, function: str, args: Mapping[str, Any], *, nonce: int | None = None
    ) -> bytes:
        """A signed extrinsic with the account's next nonce, valid for ever."""
        chain, key = self.chain, keypair(signer)
        number = chain.nonce(key.ss58_address) if nonce is None else nonce
        call = chain.codec.compose(pallet, function, args)
        genesis = bytes.fromhex(str(chain.block_hash(0))[2:])
        signing = {"era": "00", "nonce": number, "tip": 0, "tip_asset_id": None}
        payload = chain.codec.runtime.signature_payload(
            call, **signing, genesis_hash=genesis, era_block_hash=genesis, metadata_hash=None
        )
        raw, _ = chain.codec.runtime.encode_signed_extrinsic(
            call,
            public_key=bytes(key.public_key),
            signature=key.sign(bytes(payload)),
            signature_version=key.crypto_type,
            **signing,
            metadata_hash_enabled=False,
        )
        return bytes(raw)

    def block(self) -> Block:
        """Make a block, twelve seconds after the last."""
        self.now_ms += 12_000
        block, _ = self.chain.author(now_ms=self.now_ms)
        return block

    def blocks(self, count: int) -> None:
        for _ in range(count):
            self.block()

    def send(self, signer: str, function: str, pallet: str = "SubtensorModule", **args: Any) -> str | None:
        """Submit a call and include it in the next block."""
        extrinsic = self.chain.submit(self.signed(signer, pallet, function, args))
        return self.outcome(self.block(), extrinsic)

    def outcome(self, block: Block, extrinsic: Extrinsic) -> str | None:
        """The refusal of an extrinsic in a block, or None."""
        index = block.extrinsics.index(extrinsic.raw)
        for record in self.chain.storage(block.digest).read("System", "Events"):
            event = record["event"]
            if record["extrinsic_idx"] == index and event["event_id"] == "ExtrinsicFailed":
                error = event["attributes"]["dispatch_error"]
                if isinstance(error, str):
                    return error
                module = error["Module"]
                name, _ = self.chain.codec.runtime.module_error(module["index"], int(module["error"][2:4], 16))
                return str(name)
        return None

    def get(self, item: str, *params: int | str) -> Any:
        return self.chain.storage().get(item, *params)

    def set(self, item: str, value: Any, *params: int | str, pallet: str = "SubtensorModule") -> None:
        """Change storage as root, in a block of its own."""

        def change(ctx: Context) -> None:
            ctx.write(pallet, item, value, *params)

        self.chain.as_root(change)
        self.block()

    def register(self, *names: str, coldkey: str = "Bank") -> None:
        for name in names:
            assert self.send(coldkey, "burned_register", netuid=NETUID, hotkey=address(name)) is None

    def stake(self, name: str, tao: float, coldkey: str = "Bank") -> None:
        rao = round(tao * 10**9)
        assert self.send(coldkey, "add_stake", hotkey=address(name), netuid=NETUID, amount_staked=rao) is None

    def uid(self, name: str) -> Any:
        return self.get("Uids", NETUID, address(name))
