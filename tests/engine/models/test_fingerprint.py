"""The fingerprint: the same for the same, another for whatever changes keys and values."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from engine.models import fingerprint as fingerprint_module
from engine.models.config import ModelConfig
from engine.models.fingerprint import ENGINE_FOLDER, fingerprint, placing
from engine.models.load import read_config
from streamkv.errors import ModelError
from streamkv.model_files import ModelFiles, resolve
from tests.support.tiny_models import make_tiny_model

PLACING = ("torch.float32", "16 tokens")


def ignore(stage: str, percent: float) -> None:
    pass


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model("llama", folder)
    return read_config(resolve(str(folder), ignore))


def files_of(folder: Path, *contents: bytes) -> ModelFiles:
    """Weight files with such contents: only their bytes count."""
    paths = tuple(folder / f"{i}.safetensors" for i in range(len(contents)))
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return ModelFiles("folder", folder, "tiny", folder, paths)


def of(
    files: ModelFiles, config: ModelConfig, placing: tuple[str, ...] = PLACING, engine_folder: Path = ENGINE_FOLDER
) -> bytes:
    return fingerprint(files, config, placing, 2, ignore, engine_folder)


def test_the_same_model_has_the_same_wherever_it_lies_and_whatever_it_is_called(
    config: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / "copy").mkdir()
    first, second = files_of(tmp_path, b"abc", b"def"), files_of(tmp_path / "copy", b"abc", b"def")
    assert of(first, config) == of(dataclasses.replace(second, name="other"), config)
    assert len(of(first, config)) == 32
    gguf = dataclasses.replace(files_of(tmp_path, b"GGUF"), kind="gguf")
    assert of(gguf, config) == of(gguf, config)


def test_every_byte_of_every_weight_file_counts(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file is hashed in several pieces, and a piece in several reads."""
    monkeypatch.setattr(fingerprint_module, "_PIECE_BYTES", 16)
    monkeypatch.setattr(fingerprint_module, "_READ_BYTES", 5)
    contents = [bytes(range(40)), bytes(range(7))]
    seen = {of(files_of(tmp_path, *contents), config)}
    count = 1
    for i, content in enumerate(contents):
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= 1
            seen.add(of(files_of(tmp_path, *(bytes(changed) if i == j else c for j, c in enumerate(contents))), config))
            count += 1
    for others in ([*contents, b""], [*contents, b"x"], contents[:1], contents[::-1], [contents[0] + contents[1]]):
        seen.add(of(files_of(tmp_path, *others), config))
        count += others != [*contents, b""]  # an empty file says nothing
    seen.add(of(files_of(tmp_path, contents[0][16:32] + contents[0][:16] + contents[0][32:], contents[1]), config))
    assert len(seen) == count + 1


def test_what_the_decoder_knows_and_where_blocks_lie_count(config: ModelConfig, tmp_path: Path) -> None:
    files = files_of(tmp_path, b"abc")
    changed = [
        dataclasses.replace(config, rms_norm_eps=1e-4),
        dataclasses.replace(config, rope=dataclasses.replace(config.rope, theta=1e5)),
        dataclasses.replace(config, sliding_windows=(9, *config.sliding_windows[1:])),
        dataclasses.replace(config, file_dtype="quantized"),
    ]
    placings = [("torch.bfloat16", "16 tokens"), ("torch.float32", "8 tokens"), ("torch.float321", "6 tokens"), ()]
    seen = {of(files, config), *(of(files, other) for other in changed), *(of(files, config, p) for p in placings)}
    assert len(seen) == 9


def test_other_code_and_another_pytorch_begin_anew(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = files_of(tmp_path, b"abc")
    before = of(files, config)
    copy = tmp_path / "engine"
    shutil.copytree(ENGINE_FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert of(files, config, engine_folder=copy) == before
    for name in ("layers/rotary.py", "models/decoder.py", "execution/kv_cache.py", "batch.py"):
        source = copy / name
        text = source.read_text()
        source.write_text(text + "\n# another version\n")
        assert of(files, config, engine_folder=copy) != before, name
        source.write_text(text)
    (copy / "loop.py").write_text("# has no part in it")
    assert of(files, config, engine_folder=copy) == before
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        assert of(files, config) != before
    monkeypatch.setattr(fingerprint_module, "version", lambda name: "9.9.9")
    assert of(files, config) != before


def test_device_types_quantization_and_order_of_sums_count() -> None:
    words = [
        placing(torch.bfloat16, torch.bfloat16, 16, 4096),
        placing(torch.float16, torch.bfloat16, 16, 4096),
        placing(torch.bfloat16, torch.float8_e4m3fn, 16, 4096),
        placing(torch.bfloat16, torch.bfloat16, 32, 4096),
        placing(torch.bfloat16, torch.bfloat16, 16, 2048),
        placing(torch.bfloat16, torch.bfloat16, 16, 4096, "NVIDIA H200"),
        placing(torch.bfloat16, torch.bfloat16, 16, 4096, quantization="fp8"),
        placing(torch.bfloat16, torch.bfloat16, 16, 4096, is_deterministic=True),
        placing(torch.bfloat16, torch.bfloat16, 16, 4096, scales=(torch.ones(2, 3), torch.ones(2, 3))),
        placing(torch.bfloat16, torch.bfloat16, 16, 4096, scales=(torch.ones(2, 3), torch.full((2, 3), 1.0001))),
    ]
    assert len(set(words)) == len(words)
    assert placing(torch.bfloat16, torch.bfloat16, 16, 4096, scales=(None, None)) == words[0]


def test_dummy_weights_have_no_files_and_are_no_models_own(config: ModelConfig, tmp_path: Path) -> None:
    dummy = ModelFiles("folder", tmp_path, "tiny", tmp_path, ())
    told: list[float] = []
    first = fingerprint(dummy, config, PLACING, 2, lambda stage, percent: told.append(percent))
    assert first == of(dummy, config) and told == []
    (tmp_path / "empty").mkdir()
    assert first not in (of(files_of(tmp_path / "empty", b""), config), of(files_of(tmp_path, b"abc"), config))
    assert first != of(dummy, dataclasses.replace(config, rms_norm_eps=1e-4))
    assert first != of(dummy, config, ("torch.bfloat16", "16 tokens"))


def test_progress_grows_to_100_and_a_file_that_shrinks_meanwhile_is_an_error(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint_module, "_PIECE_BYTES", 16)
    files = files_of(tmp_path, bytes(100))
    told: list[tuple[str, float]] = []

    def shrink(stage: str, percent: float) -> None:
        files.weight_paths[0].write_bytes(bytes(50))

    fingerprint(files, config, PLACING, 2, lambda stage, percent: told.append((stage, percent)))
    assert {stage for stage, _ in told} == {"hashing the weights"}
    percents = [percent for _, percent in told]
    assert percents == sorted(percents) and (percents[0], percents[-1]) == (0.0, 100.0)
    with pytest.raises(ModelError, match="it has become shorter"):
        fingerprint(files, config, PLACING, 1, shrink)
