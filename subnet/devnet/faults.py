"""Faults on command, so that clients can be shown what a bad day looks like (chain.md 2, 3)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subnet.devnet.chain import Chain
from subnet.devnet.context import Context
from subnet.devnet.pallets import commit_reveal
from subnet.devnet.rpc import RpcError


@dataclass(slots=True)
class Faults:
    """What is wrong at the moment.

    `is_stalled`: no blocks are made. `is_frozen`: sockets stay open and nothing comes out of them.
    `next_failures`: errors for the next calls of a method, each used once.
    `is_lossy`: extrinsics are taken and the connection that sent one is dropped before it hears of it.
    """

    is_stalled: bool = False
    is_frozen: bool = False
    is_lossy: bool = False
    next_failures: list[tuple[str, RpcError]] = field(default_factory=list)

    def check(self, method: str) -> None:
        """Raise the error that was ordered for the next call of `method`, if any."""
        for planned in self.next_failures:
            if planned[0] == method:
                self.next_failures.remove(planned)
                raise planned[1]


class FaultCommands:
    """The `devnet_*` methods that change the chain or how it behaves."""

    def __init__(self, chain: Chain, faults: Faults, undo: Callable[[int], int]) -> None:
        self._chain = chain
        self._faults = faults
        self._undo = undo
        self.methods: Mapping[str, Callable[[Sequence[Any]], Any]] = {
            "devnet_stall": self._stall,
            "devnet_freeze": self._freeze,
            "devnet_loseSubmissions": self._lose_submissions,
            "devnet_failNext": self._fail_next,
            "devnet_setFinalityLag": self._set_finality_lag,
            "devnet_reorg": lambda params: self._undo(int(params[0])),
            "devnet_upgrade": lambda params: self._chain.upgrade(),
            "devnet_setStorage": self._set_storage,
            "devnet_drandPulse": self._drand_pulse,
        }

    def _stall(self, params: Sequence[Any]) -> bool:
        """Stop (true) or resume (false) making blocks."""
        self._faults.is_stalled = bool(params[0])
        return self._faults.is_stalled

    def _freeze(self, params: Sequence[Any]) -> bool:
        """Stop (true) or resume (false) answering, with every socket left open."""
        self._faults.is_frozen = bool(params[0])
        return self._faults.is_frozen

    def _lose_submissions(self, params: Sequence[Any]) -> bool:
        """Drop (true) each connection right after it submits, though the extrinsic is included."""
        self._faults.is_lossy = bool(params[0])
        return self._faults.is_lossy

    def _fail_next(self, params: Sequence[Any]) -> int:
        """Answer the next call of a method with an error: method, code, message, data, count."""
        method, code, message, data, *count = params
        failures = [(str(method), RpcError(int(code), str(message), data))] * (int(count[0]) if count else 1)
        self._faults.next_failures.extend(failures)
        return len(self._faults.next_failures)

    def _set_finality_lag(self, params: Sequence[Any]) -> int:
        """Blocks that finality stays behind."""
        self._chain.finality_lag = max(0, int(params[0]))
        return self._chain.finality_lag

    def _set_storage(self, params: Sequence[Any]) -> bool:
        """Set a storage value in the next block, as a sudo key could: pallet, item, map parameters, value."""
        pallet, item, keys, value = params

        def change(ctx: Context) -> None:
            ctx.write(pallet, item, value, *keys)

        self._chain.codec.key(pallet, item, *keys)
        self._chain.as_root(change)
        return True

    def _drand_pulse(self, params: Sequence[Any]) -> bool:
        """Give the chain a pulse of the beacon in the next block: round, signature (hex)."""
        drand_round, signature = int(params[0]), str(params[1]).removeprefix("0x")
        bytes.fromhex(signature)
        self._chain.as_root(lambda ctx: commit_reveal.add_pulse(ctx, drand_round, signature))
        return True
