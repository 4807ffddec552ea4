"""GGUF files: metadata and tensors, read without trusting a byte of them.

Layout, little-endian: magic, version, number of tensors, number of metadata entries; the entries; the tensors' names,
shapes, types and offsets; from the next multiple of `general.alignment` on, their data. Strings and arrays begin with
their length. The header is parsed here, with every length checked against the file, and so fast that a vocabulary of
100,000 tokens costs milliseconds; the blocks of quantised numbers are the gguf package's to understand.
"""

import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from engine.models.config import ModelConfig, has_interleaved_rope, read_gguf_config
from streamkv.errors import ModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32: Final = 6
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMS: Final = 4
_MAX_LISTED: Final = 4096
"""Longer arrays (vocabularies) are stepped over."""
_CHUNK_ELEMENTS: Final = 1 << 22
"""Tensors are dequantised so many numbers at a time: 16 MiB of float32."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    """Rows first, as in PyTorch."""
    type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufSource:
    """One GGUF file, mapped into memory. Fulfils weights.TensorSource."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for whatever is not as a GGUF should be."""
        self.description = str(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        reader = _Reader(self._data, str(path))
        num_tensors = reader.header()
        self.metadata: dict[str, object] = reader.metadata()
        """Numbers, texts and short lists by their keys; long lists are left out."""
        self._tensors = reader.tensors(num_tensors, self.metadata)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def dtype(self) -> str:
        """float32, float16, bfloat16 or quantized: how most weights are stored."""
        num_elements: Counter[str] = Counter()
        plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        for tensor in self._tensors.values():
            num_elements[plain.get(tensor.type.name, "quantized")] += math.prod(tensor.shape)
        return num_elements.most_common(1)[0][0]

    def config(self) -> ModelConfig:
        """Raises ModelError."""
        embedding = self.shapes.get("token_embd.weight", ())
        if len(embedding) != 2:
            raise ModelError(f"{self.description} has no matrix token_embd.weight, so it is no language model")
        rope_freqs: tuple[float, ...] = ()
        if "rope_freqs.weight" in self.shapes:
            values = torch.empty(self.shapes["rope_freqs.weight"])
            self.copy_into("rope_freqs.weight", values, 0)
            rope_freqs = tuple(values.flatten().tolist())
            if not all(0 < value < math.inf for value in rope_freqs):
                raise ModelError(f"{self.description}: rope_freqs.weight must hold numbers over 0")
        return read_gguf_config(
            self.metadata, self.shapes.keys(), embedding[0], rope_freqs, self.dtype, self.description
        )

    def copy_into(self, name: str, target: torch.Tensor, num_heads: int) -> None:
        tensor = self._tensors[name]
        stored = np.frombuffer(self._data, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        rows = stored.reshape(target.shape[0], -1)
        order = None
        if num_heads and has_interleaved_rope(str(self.metadata["general.architecture"])):
            order = _halves_order(target.shape[0], num_heads)
        chunk_rows = max(1, _CHUNK_ELEMENTS // max(1, target[0].numel()))
        for start in range(0, target.shape[0], chunk_rows):
            end = min(start + chunk_rows, target.shape[0])
            chunk = rows[start:end] if order is None else rows[order[start:end]]
            try:
                values = dequantize(_typed(chunk, tensor.type), tensor.type)
            except NotImplementedError as error:
                raise ModelError(
                    f"{self.description}: tensor {name} is of type {tensor.type.name}, which is not supported; "
                    "take the model in another quantisation, Q8_0 or Q4_K_M say"
                ) from error
            if not values.flags.writeable:  # still the mapped file, which PyTorch would warn of
                values = values.copy()
            target[start:end].copy_(torch.from_numpy(values).view(target[start:end].shape))


def _typed(rows: np.ndarray, tensor_type: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes as the numbers that the gguf package expects: plain types as themselves, blocks as bytes."""
    if tensor_type == gguf.GGMLQuantizationType.F32:
        return np.ascontiguousarray(rows).view(np.float32)
    if tensor_type == gguf.GGMLQuantizationType.F16:
        return np.ascontiguousarray(rows).view(np.float16)
    return rows


def _halves_order(num_rows: int, num_heads: int) -> np.ndarray:
    """Which stored row comes at each place, to undo llama.cpp's order of q and k.

    It rotates neighbouring dimensions (0, 1), (2, 3) … where the halves order pairs d with d + head_dim / 2.
    """
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


class _Reader:
    """A cursor over the header that cannot leave the file."""

    def __init__(self, data: mmap.mmap, source: str) -> None:
        self._data = data
        self._at = 0
        self._source = source

    def header(self) -> int:
        """Returns the number of tensors; the cursor is at the metadata then."""
        if self._take(4) != _MAGIC:
            raise self._damaged("does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise self._damaged(f"is of version {version}; {_VERSIONS} are supported, little-endian")
        num_tensors, self._num_entries = self._scalar("Q"), self._scalar("Q")
        return int(num_tensors)

    def metadata(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for _ in range(self._num_entries):
            key = self._string()
            if key in values:
                raise self._damaged(f"has the key {key!r:.80} twice")
            values[key] = self._value(self._scalar("I"), key)
        return {key: value for key, value in values.items() if value is not None}

    def tensors(self, num_tensors: int, metadata: dict[str, object]) -> dict[str, _Tensor]:
        alignment = metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
            raise self._damaged(f"has general.alignment {alignment!r:.80}, which must be a power of two")
        found: dict[str, _Tensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in found:
                raise self._damaged(f"has the tensor {name!r:.80} twice")
            num_dims = self._scalar("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self._damaged(f"has the tensor {name!r:.80} with {num_dims} dimensions")
            shape = tuple(int(self._scalar("Q")) for _ in range(num_dims))[::-1]
            type_number, offset = self._scalar("I"), int(self._scalar("Q"))
            try:
                tensor_type = gguf.GGMLQuantizationType(type_number)
            except ValueError as error:
                raise self._damaged(f"has the tensor {name!r:.80} of an unknown type, {type_number}") from error
            block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
            if shape[-1] % block_elements or 0 in shape:
                raise self._damaged(
                    f"has the tensor {name!r:.80} of shape {shape}, no whole blocks of {block_elements}"
                )
            num_bytes = math.prod(shape) // block_elements * block_bytes
            found[name] = _Tensor(shape, tensor_type, offset, num_bytes)
        start = -(-self._at // alignment) * alignment
        for name, tensor in found.items():
            end = start + tensor.offset + tensor.num_bytes
            if end > len(self._data):
                raise self._damaged(f"ends before its tensor {name!r:.80}: {len(self._data)} bytes of {end}")
        return {
            name: _Tensor(tensor.shape, tensor.type, start + tensor.offset, tensor.num_bytes)
            for name, tensor in found.items()
        }

    def _value(self, type_number: int, key: str) -> object:
        if type_number == _STRING:
            return self._string()
        if type_number != _ARRAY:
            return self._number(type_number, key)
        item_type, length = self._scalar("I"), int(self._scalar("Q"))
        if item_type == _STRING:
            return self._strings(length)
        if item_type not in _SCALARS:
            raise self._damaged(f"has the key {key!r:.80} with a list of an unsupported type, {item_type}")
        if length > _MAX_LISTED:
            self._take(length * struct.calcsize("<" + _SCALARS[item_type]))
            return None
        return [self._number(item_type, key) for _ in range(length)]

    def _number(self, type_number: int, key: str) -> object:
        if type_number not in _SCALARS:
            raise self._damaged(f"has the key {key!r:.80} of an unknown type, {type_number}")
        value = self._scalar(_SCALARS[type_number])
        # 1e-05 written as float32 reads back as 9.999999747378752e-06: the shortest text for it is what was meant.
        return float(str(np.float32(value))) if type_number == _FLOAT32 else value

    def _strings(self, length: int) -> list[str] | None:
        if length <= _MAX_LISTED:
            return [self._string() for _ in range(length)]
        data, at, end = self._data, self._at, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(length):
            if at + 8 > end:
                raise self._damaged("ends inside its metadata")
            at += 8 + unpack(data, at)[0]
        self._at = at
        self._take(0)
        return None

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> int:
        """Typed as int for the lengths and counts that most calls are after."""
        size = struct.calcsize("<" + code)
        value: int = struct.unpack("<" + code, self._take(size))[0]
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._data):
            raise self._damaged("ends inside its header")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._source} {what}; fetch or convert it again")
