"""JSON-RPC methods that answer from the chain; subscriptions and faults are the node's."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from subnet.devnet import apis, runtime
from subnet.devnet.chain import Chain
from subnet.devnet.codec import SPEC_NAME, SS58_FORMAT, TRANSACTION_VERSION
from subnet.devnet.extrinsics import PoolError
from subnet.devnet.scale import compact, vector
from subnet.errors import NotFound, ProtocolViolation

_MAX_KEYS = 1_000
_CACHED_ANSWERS = 64
_METADATA_VERSIONS = (14, 15)
_PAYMENT_API = "TransactionPaymentApi_query_info"


class RpcError(Exception):
    """A JSON-RPC error answer."""

    def __init__(self, code: int, message: str, data: str | None = None) -> None:
        super().__init__(f"{code} {message}")
        self.code = code
        self.message = message
        self.data = data


class Rpc:
    """Answers for one chain."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._shown_codec = chain.codec
        self._metadata_hex: dict[int, str] = {}
        self._answers: OrderedDict[tuple[str, str, str], str | None] = OrderedDict()
        self.methods: Mapping[str, Callable[[Sequence[Any]], Any]] = {
            "account_nextIndex": self._next_index,
            "author_submitExtrinsic": self._submit,
            "chain_getBlock": self._block,
            "chain_getBlockHash": self._block_hash,
            "chain_getFinalisedHead": self._finalized_head,
            "chain_getFinalizedHead": self._finalized_head,
            "chain_getHead": self._head,
            "chain_getHeader": self._header,
            "rpc_methods": self._names,
            "state_call": self._call,
            "state_getKeys": self._keys,
            "state_getKeysPaged": self._keys,
            "state_getMetadata": self._metadata,
            "state_getRuntimeVersion": self.runtime_version,
            "state_getStorage": self._storage,
            "state_getStorageAt": self._storage,
            "state_queryStorageAt": self.query_storage,
            "system_accountNextIndex": self._next_index,
            "system_chain": lambda params: "Bittensor",
            "system_health": lambda params: {"peers": 0, "isSyncing": False, "shouldHavePeers": False},
            "system_name": lambda params: "strata-devnet",
            "system_properties": lambda params: {
                "ss58Format": SS58_FORMAT,
                "tokenDecimals": 9,
                "tokenSymbol": "TAO",
            },
            "system_version": lambda params: "1",
        }

    def answer(self, method: str, params: Sequence[Any]) -> Any:
        """The result of a call. Raises RpcError."""
        respond = self.methods.get(method)
        if respond is None:
            raise RpcError(-32601, f"Method not found: {method}")
        try:
            return respond(params)
        except PoolError as error:
            raise RpcError(error.code, error.message, error.data) from error
        except NotFound as error:
            raise RpcError(4003, f"Client error: Api called for an unknown Block: {error}") from error
        except (IndexError, TypeError, ValueError, ProtocolViolation) as error:
            raise RpcError(-32602, f"Invalid params of {method}: {error}") from error

    def runtime_version(self, params: Sequence[Any]) -> Any:
        """The runtime's name and versions at a block."""
        return {
            "specName": SPEC_NAME,
            "implName": SPEC_NAME,
            "authoringVersion": 1,
            "specVersion": self._chain.spec_version_at(_optional(params, 0)),
            "implVersion": 1,
            "apis": [],
            "transactionVersion": TRANSACTION_VERSION,
            "stateVersion": 1,
        }

    def query_storage(self, params: Sequence[Any]) -> Any:
        """Values of several keys at one block."""
        digest = _optional(params, 1)
        view = self._chain.view(digest)
        changes = [[key, _hex(view.get(_bytes(key)))] for key in params[0]]
        return [{"block": digest or self._chain.head.digest, "changes": changes}]

    def _next_index(self, params: Sequence[Any]) -> int:
        return self._chain.pool.next_nonce(params[0], self._chain.nonce(params[0]))

    def _submit(self, params: Sequence[Any]) -> str:
        return self._chain.submit(_bytes(params[0])).digest

    def _block(self, params: Sequence[Any]) -> Any:
        block = self._chain.block(_optional(params, 0))
        if block is None:
            return None
        extrinsics = [_hex(extrinsic) for extrinsic in block.extrinsics]
        return {"block": {"header": block.header, "extrinsics": extrinsics}, "justifications": None}

    def _block_hash(self, params: Sequence[Any]) -> str | None:
        number = _optional(params, 0)
        if number is None:
            return self._chain.head.digest
        return self._chain.block_hash(int(number, 16) if isinstance(number, str) else int(number))

    def _head(self, params: Sequence[Any]) -> str:
        return self._chain.head.digest

    def _finalized_head(self, params: Sequence[Any]) -> str | None:
        return self._chain.block_hash(self._chain.finalized_number)

    def _header(self, params: Sequence[Any]) -> Any:
        block = self._chain.block(_optional(params, 0))
        return None if block is None else block.header

    def _names(self, params: Sequence[Any]) -> Any:
        return {"methods": sorted(self.methods)}

    def _call(self, params: Sequence[Any]) -> str | None:
        """A runtime API call; answers are kept, for many clients ask the same of the same block."""
        name, data, digest = params[0], params[1] or "", _optional(params, 2)
        if name == "Metadata_metadata_at_version":
            return self._metadata_at(int.from_bytes(_bytes(data), "little"))
        key = (name, data, digest or self._chain.head.digest)
        if key not in self._answers:
            self._answers[key] = self._runtime_answer(name, _bytes(data), digest)
            if len(self._answers) > _CACHED_ANSWERS:
                self._answers.popitem(last=False)
        return self._answers[key]

    def _runtime_answer(self, name: str, data: bytes, digest: str | None) -> str | None:
        codec = self._chain.codec
        if name == "Metadata_metadata_versions":
            versions = b"".join(version.to_bytes(4, "little") for version in _METADATA_VERSIONS)
            return _hex(compact(len(_METADATA_VERSIONS)) + versions)
        method = codec.api(name)
        if name == _PAYMENT_API and method is not None:
            size_bytes = int.from_bytes(data[-4:], "little")
            return _hex(runtime.payment_info(codec, method.output, size_bytes))
        answer = apis.answer(self._chain.storage(digest), name, data)
        if answer is None:
            raise RpcError(4003, f"Client error: Exported method {name} is not found")
        return _hex(answer)

    def _metadata_at(self, version: int) -> str:
        """Metadata as hex, large and asked for by every new client: made once for the present runtime."""
        codec = self._chain.codec
        if codec is not self._shown_codec:
            self._shown_codec, self._metadata_hex = codec, {}
        if version not in self._metadata_hex:
            known = {14: codec.metadata_v14, 15: codec.metadata_v15}.get(version)
            self._metadata_hex[version] = "0x" + (b"\x00" if known is None else b"\x01" + vector(known)).hex()
        return self._metadata_hex[version]

    def _keys(self, params: Sequence[Any]) -> list[str | None]:
        """Keys below a prefix, `count` of them after `start`."""
        prefix, count = _bytes(params[0]), min(_MAX_KEYS, _optional(params, 1) or _MAX_KEYS)
        start = _bytes(_optional(params, 2) or "0x")
        keys = [key for key in self._chain.view(_optional(params, 3)).keys(prefix) if key > start]
        return [_hex(key) for key in keys[:count]]

    def _metadata(self, params: Sequence[Any]) -> str | None:
        return _hex(self._chain.codec.metadata_v14)

    def _storage(self, params: Sequence[Any]) -> str | None:
        return _hex(self._chain.view(_optional(params, 1)).get(_bytes(params[0])))


def _optional(params: Sequence[Any], index: int) -> Any:
    return params[index] if len(params) > index else None


def _bytes(text: str) -> bytes:
    """Bytes of hex with or without 0x: runtime API parameters come without."""
    return bytes.fromhex(text.removeprefix("0x"))


def _hex(data: bytes | None) -> str | None:
    return None if data is None else "0x" + data.hex()
