"""Weights that could not be set: what happened and what to do, kept until they are set again.

On disk too, so that `strata doctor`, which is another process, can show it.
"""

import logging
import time
from pathlib import Path

import msgspec

from subnet.adapters.system import write_atomically
from subnet.errors import NotFound, Refused, StrataError, TransientFailure
from subnet.types import Hotkey

log = logging.getLogger(__name__)

_UPDATE = "update Strata, then restart the validator"
_REGISTER = "register the hotkey: btcli subnets register --netuid {netuid}"
_STAKE = "stake on the hotkey: btcli stake add --netuid {netuid}; a permit comes with the next epoch"
_WAITS = "nothing: it is tried again when the chain allows it"
_REPORT = "report this as a fault of Strata, with the log"
_REMEDIES = {
    "not_registered": _REGISTER,
    "HotKeyNotRegisteredInSubNet": _REGISTER,
    "HotKeyNotRegisteredInNetwork": _REGISTER,
    "NeuronNoValidatorPermit": _STAKE,
    "NotEnoughStakeToSetWeights": _STAKE,
    "version_key": _UPDATE,
    "IncorrectWeightVersionKey": _UPDATE,
    "IncorrectCommitRevealVersion": _UPDATE,
    "SettingWeightsTooFast": _WAITS,
    "CommittingWeightsTooFast": _WAITS,
    "TooManyUnrevealedCommits": _WAITS,
    "CommitRevealEnabled": _WAITS,
    "CommitRevealDisabled": _WAITS,
    "no_weights": "nothing, if all miners left; otherwise look at the run with: strata chain --netuid {netuid}",
    "too_few_weights": "ask the subnet's owner to lower min_allowed_weights, or wait for more miners",
    "bad_weight": _REPORT,
    "MaxWeightExceeded": _REPORT,
    "DuplicateUids": _REPORT,
    "UidVecContainInvalidOne": _REPORT,
    "no_wallet": "start with the wallet that holds the hotkey: --wallet.name and --wallet.hotkey",
    "unreachable": "check --network and --subtensor.chain_endpoint; it is tried again by itself",
    "no_subnet": "check --netuid and --network",
}
"""What to do, by the chain's name or ours for what is wrong."""
_OTHERWISE = "look the chain's reason up with: btcli tx set-weights --help   and in the log"


class WeightsAlert(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why one key's weights are not set on one subnet, since when (unix s), and what to do."""

    hotkey: Hotkey
    netuid: int
    since_s: float
    code: str
    reason: str
    remedy: str


class WeightsAlerts:
    """The present alert of one key on one subnet; without a directory, for this process only."""

    def __init__(self, directory: Path | None, hotkey: Hotkey, netuid: int) -> None:
        self._path = None if directory is None else directory / f"weights-alert-{hotkey}-{netuid}.json"
        self._hotkey = hotkey
        self._netuid = netuid
        self.current = self._load()

    def put(self, error: StrataError) -> None:
        """Note a failure. The same one again keeps its time and is not logged again."""
        code = _code(error)
        if self.current is not None and self.current.code == code:
            return
        remedy = _REMEDIES.get(code, _OTHERWISE).format(netuid=self._netuid)
        self.current = WeightsAlert(
            hotkey=self._hotkey,
            netuid=self._netuid,
            since_s=time.time(),
            code=code,
            reason=str(error),
            remedy=remedy,
        )
        log.error("weights not set", extra={"code": code, "reason": str(error), "remedy": remedy})
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, msgspec.json.encode(self.current))

    def clear(self) -> None:
        """Weights were set: nothing is wrong any more."""
        if self.current is not None:
            log.info("weights are set again", extra={"was": self.current.code})
        self.current = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _load(self) -> WeightsAlert | None:
        if self._path is None or not self._path.is_file():
            return None
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=WeightsAlert)
        except msgspec.DecodeError:
            return None
        return found if (found.hotkey, found.netuid) == (self._hotkey, self._netuid) else None


def _code(error: StrataError) -> str:
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, TransientFailure):
        return "unreachable"
    return "no_subnet" if isinstance(error, NotFound) else type(error).__name__
