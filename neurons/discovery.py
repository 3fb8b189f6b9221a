"""How a node finds the run of a subnet, and whether it may take part and will be paid (chain.md 2)."""

import msgspec

from neurons.exit_codes import ExitCode
from neurons.settings import NodeSettings
from subnet import wire
from subnet.adapters.http_client import parse_url
from subnet.errors import NotFound, ProtocolViolation, StartupRefused, TransientFailure
from subnet.ports import Chain
from subnet.types import Hotkey, Metagraph, Neuron
from subnet.wire import PROTOCOL_VERSION, Discovery

_LIMIT_BYTES = 4096
_WEIGHTS_FRESH_TEMPOS = 2
_BURNS_ALL = 0.999


class _VersionOnly(msgspec.Struct):
    """The one field of a discovery record that every protocol version has."""

    v: int


async def find_run(chain: Chain, netuid: int) -> tuple[Discovery, Hotkey]:
    """The run that the owner of `netuid` announced, and the owner's hotkey: the only receiver a node signs for.

    Raises StartupRefused: no such netuid, no run, another protocol version, chain out of reach.
    """
    metagraph = await read_metagraph(chain, netuid)
    owner = metagraph.owner_hotkey
    try:
        record = await chain.commitment(owner)
    except TransientFailure as error:
        raise _unreachable(error) from error
    if record is None:
        raise _no_run(netuid, "its owner has committed no run")
    _check_version(record, netuid)
    try:
        discovery = wire.decode(Discovery, record, limit_bytes=_LIMIT_BYTES)
    except ProtocolViolation as error:
        raise _no_run(netuid, f"what its owner committed is no Strata record ({error})") from error
    if not _is_usable(discovery.u):
        raise _no_run(netuid, f"its owner's record names no usable orchestrator URL ({discovery.u[:80]!r})")
    return discovery, owner


def _is_usable(text: str) -> bool:
    try:
        url = parse_url(text)
    except ProtocolViolation:
        return False
    return url.scheme in ("http", "https") and bool(url.raw_host) and not url.raw_query_string and not url.raw_fragment


async def read_metagraph(chain: Chain, netuid: int) -> Metagraph:
    """The subnet now. Raises StartupRefused: no netuid given, no such netuid, chain out of reach."""
    if netuid == 0:
        raise StartupRefused("which subnet? Name it with --netuid or STRATA_NETUID.", ExitCode.INVALID_CONFIG)
    try:
        return await chain.metagraph()
    except NotFound as error:
        raise StartupRefused(
            f"this chain has no subnet {netuid}.\nLook at the list with: btcli subnets list   and check --network.",
            ExitCode.NO_SUCH_NETUID,
        ) from error
    except TransientFailure as error:
        raise _unreachable(error) from error


def _check_version(record: bytes, netuid: int) -> None:
    try:
        version = msgspec.json.decode(record[:_LIMIT_BYTES], type=_VersionOnly).v
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_run(netuid, "what its owner committed is no Strata record") from error
    if version == PROTOCOL_VERSION:
        return
    remedy = (
        "Update this software: git pull && .venv/bin/pip install -e .   then start again."
        if version > PROTOCOL_VERSION
        else "The run is the older side: its owner has to update the orchestrator; or install the version it names."
    )
    raise StartupRefused(
        f"the run of netuid {netuid} speaks protocol {version}, this software {PROTOCOL_VERSION}.\n{remedy}",
        ExitCode.VERSION_MISMATCH,
    )


def _no_run(netuid: int, why: str) -> StartupRefused:
    return StartupRefused(
        f"netuid {netuid} has no Strata run: {why}.\nCheck --netuid and --network; an owner starts one with: strata init-run",
        ExitCode.NO_RUN,
    )


def _unreachable(error: TransientFailure) -> StartupRefused:
    return StartupRefused(
        f"the chain cannot be reached: {error}.\n"
        "Check --network, --subtensor.chain_endpoint and the connection, then start again.",
        ExitCode.CHAIN_UNREACHABLE,
    )


def require_registered(
    metagraph: Metagraph, hotkey: Hotkey, *, node: NodeSettings, price_tao: float | None = None
) -> Neuron:
    """The neuron of `hotkey`. Raises StartupRefused with the price and the command; Strata never registers by itself."""
    neuron = metagraph.by_hotkey().get(hotkey)
    if neuron is not None:
        return neuron
    network = "" if node.endpoint == "finney" else f" -n {node.endpoint}"
    price = (
        f"Registration costs {price_tao:.9g} TAO now"
        if price_tao is not None
        else f"btcli subnets burn-cost {metagraph.netuid}{network} tells the price"
    )
    raise StartupRefused(
        f"hotkey {hotkey} is not registered on netuid {metagraph.netuid}. {price}; to pay it, type:\n"
        f"btcli subnets register --netuid {metagraph.netuid} -w {node.wallet} -H {node.hotkey}{network}",
        ExitCode.NOT_REGISTERED,
    )


def reasons_to_earn_nothing(metagraph: Metagraph, *, is_started: bool | None = None) -> list[str]:
    """Why nobody on this subnet is paid at present (users.md 36), each as a sentence; empty when nothing stands in the way.

    `is_started`: whether the owner's start call was made, None when that is not known.
    """
    return list(obstacles_to_pay(metagraph, is_started=is_started).values())


def obstacles_to_pay(metagraph: Metagraph, *, is_started: bool | None = None) -> dict[str, str]:
    """The same by the case's name."""
    reasons: dict[str, str] = {}
    netuid, tempo = metagraph.netuid, metagraph.tempo
    if is_started is False:
        reasons["not_started"] = (
            f"you will earn 0 because netuid {netuid} was never started; its owner types: btcli tx start-call --netuid {netuid}"
        )
    validators = [neuron for neuron in metagraph.neurons if neuron.validator_permit]
    oldest = metagraph.at_block - _WEIGHTS_FRESH_TEMPOS * tempo
    if not validators:
        reasons["no_validator"] = (
            "you will earn 0 because no validator has a permit: none has enough stake on this subnet"
        )
    elif all(neuron.last_update_block < oldest for neuron in validators):
        reasons["no_weights"] = (
            f"you will earn 0 because no validator has set weights for {_WEIGHTS_FRESH_TEMPOS * tempo} blocks"
        )
    burned = sum(neuron.incentive for neuron in metagraph.neurons if neuron.hotkey == metagraph.owner_hotkey)
    if burned >= _BURNS_ALL:
        reasons["burns_all"] = (
            "you will earn 0 because validators give all weight to the owner's hotkey, which burns it"
        )
    return reasons
