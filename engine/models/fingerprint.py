"""What makes the keys and values of a model, in 32 bytes: blocks that are kept over restarts are bound to it."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from engine.models.config import ModelConfig
from streamkv.config import Quantization
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, ReportProgress

_CODE: Final = ("batch.py", "execution", "kernels", "layers", "models")
"""Below engine/: all that has a part in computing and placing keys and values."""
_PIECE_BYTES: Final = 64 * 2**20
_READ_BYTES: Final = 2**20
_STAGE: Final = "hashing the weights"

ENGINE_FOLDER: Final = Path(__file__).parents[1]


def fingerprint(
    files: ModelFiles,
    config: ModelConfig,
    placing: Iterable[str],
    num_threads: int,
    report: ReportProgress,
    engine_folder: Path = ENGINE_FOLDER,
) -> bytes:
    """32 bytes that differ if anything differs that the values depend on.

    That is: every byte of the weight files, and so their quantisation (dummy weights, which have no files, follow from
    the code and the device); what the decoder knows of the model; the code that computes (another version of the engine
    begins anew) and the versions of PyTorch and Triton; and `placing`, see there. How products are computed is left
    out: it is chosen by measurement, and each way is as good as another. Costs one reading of the weights, a GB a
    second and thread. Raises ModelError.
    """
    digest = hashlib.sha256()

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)

    if files.weight_paths:
        for piece in _weight_digests(files.weight_paths, num_threads, report):
            add(piece)
    else:
        add(b"dummy weights")
    add(repr(config).encode())
    add(_code_digest(engine_folder))
    add(torch.__version__.encode())
    add(_triton_version().encode())
    for word in placing:
        add(word.encode())
    return digest.digest()


def placing(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    block_size: int,
    block_bytes: int,
    device_name: str = "cpu",
    quantization: Quantization = "none",
    is_deterministic: bool = False,
    scales: Iterable[torch.Tensor | None] = (),
) -> tuple[str, ...]:
    """Words for what keys and values depend on beside the model, and for how a block holds them.

    dtype: of weights and activations. device_name: as the driver calls the GPU, since each kind sums in its own way.
    scales: float32, of a float8 cache; they are measured at each start, and others would give other values.
    """
    held = [scale.cpu().numpy().tobytes() for scale in scales if scale is not None]
    return (
        device_name,
        str(dtype),
        str(cache_dtype),
        f"blocks of {block_size} tokens in {block_bytes} bytes",
        f"quantization {quantization}",
        "deterministic" if is_deterministic else "any order of sums",
        f"scales {hashlib.sha256(b''.join(held)).hexdigest()}",
    )


def _triton_version() -> str:
    """Empty where it is not installed, and so has no part."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _weight_digests(paths: Iterable[Path], num_threads: int, report: ReportProgress) -> Iterator[bytes]:
    """Of every piece of the files, in order."""
    pieces: list[tuple[Path, int, int]] = []
    for path in paths:
        size = path.stat().st_size
        pieces += [(path, start, min(_PIECE_BYTES, size - start)) for start in range(0, size, _PIECE_BYTES)]
    report(_STAGE, 0.0)
    with ThreadPoolExecutor(num_threads, "hash") as pool:
        for i, digest in enumerate(pool.map(_piece_digest, *zip(*pieces, strict=True))):
            yield digest
            report(_STAGE, 100.0 * (i + 1) / len(pieces))


def _piece_digest(path: Path, start: int, num_bytes: int) -> bytes:
    """Of the bytes, and of their place; hashing and reading let the interpreter go."""
    digest = hashlib.sha256(f"{start} {num_bytes}".encode())
    buffer = memoryview(bytearray(min(_READ_BYTES, num_bytes)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while num_bytes:
                num_read = file.readinto(buffer[: min(len(buffer), num_bytes)])
                if not num_read:
                    raise OSError("it has become shorter")
                digest.update(buffer[:num_read])
                num_bytes -= num_read
    except OSError as error:
        raise ModelError(f"{path} cannot be read again for its fingerprint: {error}") from error
    return digest.digest()


def _code_digest(engine_folder: Path) -> bytes:
    digest = hashlib.sha256()
    for name in _CODE:
        path = engine_folder / name
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            data = source.read_bytes()
            digest.update(f"{source.relative_to(engine_folder).as_posix()} {len(data)} ".encode())
            digest.update(data)
    return digest.digest()
