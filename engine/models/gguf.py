"""GGUF files: metadata and tensors, read without trusting a byte of them.

`streamkv.gguf_header` reads the metadata; the tensors' table stands behind it, and from the next multiple of
`general.alignment` on, their data. The blocks of quantised numbers are the gguf package's to understand.
"""

import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch
from gguf.quants import dequantize

from engine.models.config import ModelConfig, has_interleaved_rope, read_gguf_config
from streamkv.errors import ModelError
from streamkv.gguf_header import GgufHeader, MetadataValue

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
        header = GgufHeader(self._data, str(path))
        self.metadata: dict[str, MetadataValue] = header.metadata(_MAX_LISTED)
        """Numbers, texts and short lists by their keys; long lists are left out."""
        self._tensors = _read_tensors(header, self.metadata, len(self._data))
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


def _read_tensors(header: GgufHeader, metadata: Mapping[str, MetadataValue], num_file_bytes: int) -> dict[str, _Tensor]:
    """The table behind the metadata; every tensor lies within the file."""
    alignment = metadata.get("general.alignment", 32)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment & alignment - 1:
        raise header.damaged(f"has general.alignment {alignment!r:.80}, which must be a power of two")
    found: dict[str, _Tensor] = {}
    for _ in range(header.num_tensors):
        name = header.text()
        if name in found:
            raise header.damaged(f"has the tensor {name!r:.80} twice")
        num_dims = header.whole_number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise header.damaged(f"has the tensor {name!r:.80} with {num_dims} dimensions")
        shape = tuple(header.whole_number("Q") for _ in range(num_dims))[::-1]
        type_number, offset = header.whole_number("I"), header.whole_number("Q")
        try:
            tensor_type = gguf.GGMLQuantizationType(type_number)
        except ValueError as error:
            raise header.damaged(f"has the tensor {name!r:.80} of an unknown type, {type_number}") from error
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        if shape[-1] % block_elements or 0 in shape:
            raise header.damaged(f"has the tensor {name!r:.80} of shape {shape}, no whole blocks of {block_elements}")
        num_bytes = math.prod(shape) // block_elements * block_bytes
        found[name] = _Tensor(shape, tensor_type, offset, num_bytes)
    start = -(-header.at // alignment) * alignment
    for name, tensor in found.items():
        end = start + tensor.offset + tensor.num_bytes
        if end > num_file_bytes:
            raise header.damaged(f"ends before its tensor {name!r:.80}: {num_file_bytes} bytes of {end}")
    return {
        name: _Tensor(tensor.shape, tensor.type, start + tensor.offset, tensor.num_bytes)
        for name, tensor in found.items()
    }
