"""What a coldkey does on the chain: register, transfer, stake. Used by local subnets and set-up, never by a role."""

from collections.abc import Awaitable, Callable
from typing import Any

import bittensor as bt

from subnet.adapters.chain import BittensorChain
from subnet.errors import Refused
from subnet.types import Hotkey

_RAO = 1_000_000_000
_FEE_RESERVE_TAO = 0.001


class ChainAccounts:
    """Coldkey operations through an open chain connection; each is verified by reading back."""

    def __init__(self, chain: BittensorChain) -> None:
        self._chain = chain

    async def burned_register(self, wallet: Any, hotkey: str | None = None) -> int:
        """Register a hotkey (the wallet's own by default) and return its uid; registered already is no error."""
        address = Hotkey(hotkey or wallet.hotkey.ss58_address)
        call = bt.calls.SubtensorModule.burned_register(netuid=self._chain.netuid, hotkey=address)

        async def uid() -> int | None:
            found = (await self._chain.fresh_metagraph()).by_hotkey().get(address)
            return None if found is None else int(found.uid)

        known = await uid()
        return known if known is not None else await self._submit("registration", call, wallet, uid)

    async def transfer(self, wallet: Any, address: str, tao: float) -> None:
        """Move TAO to an account. Refused when the wallet has too little."""
        before = await self._chain.balance(address)
        call = bt.calls.Balances.transfer_keep_alive(dest=address, value=round(tao * _RAO))

        async def arrived() -> int | None:
            return 0 if await self._chain.balance(address) >= before + tao - 1 / _RAO else None

        await self._submit("transfer", call, wallet, arrived)

    async def add_stake(self, wallet: Any, hotkey: str, tao: float) -> None:
        """Stake TAO on a registered hotkey."""
        payer = _coldkey(wallet)
        before = await self._chain.balance(payer)
        call = bt.calls.SubtensorModule.add_stake(
            hotkey=hotkey, netuid=self._chain.netuid, amount_staked=round(tao * _RAO)
        )

        async def paid() -> int | None:
            return 0 if await self._chain.balance(payer) <= before - tao + _FEE_RESERVE_TAO else None

        if before < tao + _FEE_RESERVE_TAO:
            raise Refused("balance", f"{payer} has {before} TAO; staking {tao} needs {tao + _FEE_RESERVE_TAO}")
        await self._submit("stake", call, wallet, paid)

    async def start_call(self, wallet: Any) -> None:
        """Start the subnet, as its owner."""
        call = bt.calls.SubtensorModule.start_call(netuid=self._chain.netuid)

        async def started() -> int | None:
            return 0 if await self._chain.is_started() else None

        await self._submit("start call", call, wallet, started)

    async def _submit(self, what: str, call: Any, wallet: Any, landed: Callable[[], Awaitable[int | None]]) -> int:
        async def send(client: bt.Client) -> bt.ExtrinsicResult:
            return await client.submit_call(call, wallet)

        return await self._chain.session.submit(what, send, landed, key=_coldkey(wallet))


def _coldkey(wallet: Any) -> str:
    return str(getattr(wallet, "coldkeypub", wallet).ss58_address)
