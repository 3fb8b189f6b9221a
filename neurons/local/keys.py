"""Real Bittensor wallets for a local subnet, without passwords: whoever reads them gets money that is worth nothing."""

import hashlib

import bittensor as bt

from neurons.local.plan import Plan
from subnet.types import Hotkey


def create_wallets(plan: Plan) -> dict[str, bt.Wallet]:
    """A wallet for each process by its name: one coldkey for the owner, one for all miners, one for each validator."""
    wallets: dict[str, bt.Wallet] = {}
    with_coldkey: dict[str, None] = {}
    for part in plan.parts:
        wallet = bt.Wallet(part.wallet, part.name, str(plan.layout.wallets))
        if part.wallet not in with_coldkey:
            wallet.regenerate_coldkey(seed=_seed(plan, part.wallet), use_password=False, suppress=True)
            with_coldkey[part.wallet] = None
        wallet.regenerate_hotkey(seed=_seed(plan, f"{part.wallet}/{part.name}"), use_password=False, suppress=True)
        wallets[part.name] = wallet
    return wallets


def hotkeys_of(wallets: dict[str, bt.Wallet]) -> dict[str, Hotkey]:
    """The address that signs, by name of the process."""
    return {name: Hotkey(wallet.hotkey.ss58_address) for name, wallet in wallets.items()}


def _seed(plan: Plan, what: str) -> str:
    """The same keys for the same --seed, so that two runs can be compared line by line."""
    return "0x" + hashlib.sha256(f"strata localnet {plan.options.seed} {what}".encode()).hexdigest()
