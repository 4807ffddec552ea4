"""The head of a GGUF file, as both processes read it. (Damaged files: tests/engine/models, tests/gateway.)"""

import mmap
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from streamkv.errors import ModelError
from streamkv.gguf_header import GgufHeader


def open_header(path: Path) -> GgufHeader:
    with path.open("rb") as file:
        return GgufHeader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))


def write(path: Path, **lists: list[int] | list[float] | list[str]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in lists.items():
        writer.add_array(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_long_lists_are_stepped_over_and_what_stands_behind_them_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", texts=["x", "longer", ""], numbers=[1, 2, 3], behind=["é"])
    everything = {"general.architecture": "llama", "texts": ["x", "longer", ""], "numbers": [1, 2, 3], "behind": ["é"]}
    header = open_header(path)
    assert header.metadata() == everything and header.at == path.stat().st_size
    header = open_header(path)
    assert header.metadata(max_listed=2) == {"general.architecture": "llama", "behind": ["é"]}
    assert header.at == path.stat().st_size


def test_a_float32_reads_as_the_shortest_number_for_it(tmp_path: Path) -> None:
    edges = [1e-05, 1e-06, 0.1, 3.4028235e38, 1.1754944e-38, 1e-45, 16777217.0, -0.0, float("inf")]
    values = [*edges, *np.random.default_rng(3).standard_normal(300).tolist()]
    read = open_header(write(tmp_path / "a.gguf", floats=values)).metadata()["floats"]
    assert read == [float(str(np.float32(value))) for value in values]


def test_a_key_that_comes_twice_is_refused(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sIB", 1, b"k", 0, 7)
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * entry)
    with pytest.raises(ModelError, match=r"a\.gguf has the key 'k' twice"):
        open_header(path).metadata()
