"""A model directory on disk: only the tensors that are asked for are read, through safetensors' memory map."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import safetensors
import torch
from tokenizers import Tokenizer
from torch import Tensor

from subnet.errors import InvalidConfig
from subnet.frames import digest
from subnet.inference.served import ServedModel, read_config
from subnet.types import Digest

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class ModelDirectory:
    """config.json, safetensors files and tokenizer.json, as Hugging Face lays them out. Raises InvalidConfig."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = self._read("config.json")
        self.served: ServedModel = read_config(config)
        self._files = self._places()
        self.digest: Digest = digest(config + json.dumps(self._heads(), sort_keys=True).encode())
        """Of the configuration and of the names, types and shapes of all tensors; their values are not read for it."""

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.path.resolve().name

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            raise InvalidConfig(f"{self.path} is no model directory: it has no {name}") from None
        except OSError as error:
            raise InvalidConfig(f"{self.path / name} cannot be read: {error}") from error

    def _places(self) -> dict[str, list[str]]:
        """Tensors of each file."""
        if (self.path / _INDEX).exists():
            try:
                index = msgspec.json.decode(self._read(_INDEX), type=dict[str, dict[str, object]])
            except msgspec.DecodeError as error:
                raise InvalidConfig(f"{self.path / _INDEX} does not decode: {error}") from error
            files: dict[str, list[str]] = {}
            for name, file in sorted(index.get("weight_map", {}).items()):
                files.setdefault(Path(str(file)).name, []).append(name)
            return files
        if not (self.path / _SINGLE).exists():
            raise InvalidConfig(f"{self.path} is no model directory: it has neither {_SINGLE} nor {_INDEX}")
        with self._open(_SINGLE) as file:
            return {_SINGLE: sorted(file.keys())}

    def _open(self, name: str) -> safetensors.safe_open:
        try:
            return safetensors.safe_open(self.path / name, framework="pt", device="cpu")
        except (OSError, safetensors.SafetensorError) as error:
            raise InvalidConfig(f"{self.path / name} is no safetensors file: {error}") from error

    def _heads(self) -> list[list[object]]:
        heads: list[list[object]] = []
        for name, tensors in self._files.items():
            with self._open(name) as file:
                for tensor in tensors:
                    piece = file.get_slice(tensor)
                    heads.append([tensor, str(piece.get_dtype()), list(piece.get_shape())])
        return sorted(heads, key=lambda head: str(head[0]))

    def tensors(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> dict[str, Tensor]:
        """Params by their name in the run; `wanted` names each one's place in the files and its shape."""
        by_stored: dict[str, list[str]] = {}
        for name, (stored, _) in wanted.items():
            by_stored.setdefault(stored, []).append(name)
        found: dict[str, Tensor] = {}
        for file_name, stored_names in self._files.items():
            own = [stored for stored in stored_names if stored in by_stored]
            if not own:
                continue
            with self._open(file_name) as file:
                for stored in own:
                    tensor = file.get_tensor(stored).to(dtype)
                    found |= dict.fromkeys(by_stored[stored], tensor)
        self._check(found, wanted)
        return found

    def _check(self, found: Mapping[str, Tensor], wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        for name, (stored, shape) in wanted.items():
            if name not in found:
                raise InvalidConfig(f"{self.path} lacks the tensor {stored}")
            if tuple(found[name].shape) != shape:
                raise InvalidConfig(f"tensor {stored} must have shape {shape}, got {tuple(found[name].shape)}")

    def tokenizer(self) -> Tokenizer:
        """What turns text into ids and back."""
        data = self._read("tokenizer.json")
        try:
            return Tokenizer.from_buffer(data)
        except ValueError as error:
            raise InvalidConfig(f"{self.path / 'tokenizer.json'} does not load: {error}") from error


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory of params, each counted once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
