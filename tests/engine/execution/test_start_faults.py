"""What a machine lacks for the kernels, and memory that runs out while an engine starts, name what can mend it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime import build, cache
from triton.runtime.errors import OutOfResources

from engine.execution.start_faults import StartFaults, lacking_for_triton
from engine.kernels.compiling import compiling_together
from streamkv.errors import ConfigError, ModelError

CPU = torch.device("cpu")


def build_in(folder: Path) -> Callable[[], object]:
    """What a first launch does on a GPU, with a source that every C compiler takes."""

    def run() -> object:
        return build.compile_module_from_src("int nothing(void) { return 0; }", f"nothing_{folder.name}")

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache: empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def told(run: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as raised, StartFaults(CPU):
        run()
    assert raised.value.__cause__ is not None
    return raised.value


def test_a_machine_without_a_c_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    error = told(build_in(folder))
    assert error.field == "CC" and "there is no C compiler; install gcc" in error.message


def test_a_c_compiler_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(folder / "no-cc"))
    error = told(build_in(folder))
    assert error.field == "CC" and f"{folder}/no-cc cannot be run (No such file or directory)" in error.message


def test_a_c_compiler_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = folder / "cc"
    compiler.write_text("#!/bin/sh\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    error = told(build_in(folder))
    assert error.field == "CC" and f"{compiler} fails (status 3;" in error.message


def test_a_cache_that_cannot_be_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "file" / "cache"))
    error = told(build_in(folder))
    assert error.field == "TRITON_CACHE_DIR"
    assert f"kept in {folder}/file/cache (Not a directory); set the variable to a folder" in error.message


def test_a_cache_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a read-only file system, whoever runs this."""

    def refuse(path: str, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", path)

    manager = cache.FileCacheManager("key")
    monkeypatch.setattr(os, "makedirs", refuse)
    error = told(lambda: manager.put(b"code", "kernel.cubin"))
    assert error.field == "TRITON_CACHE_DIR" and "Read-only file system" in error.message


def test_no_folder_for_temporary_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(folder / "gone"))
    error = told(build_in(folder))
    assert error.field == "TMPDIR" and "set the variable" in error.message


def test_what_a_thread_that_compiles_lacks_is_told_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.kernels.compiling import _async_compile

    monkeypatch.setenv("PATH", str(folder))

    def compile_one() -> None:
        assert _async_compile is not None
        with compiling_together(2, lambda percent: None):
            _async_compile.active_mode.get().submit("key", build_in(folder), lambda kernel: None)

    assert told(compile_one).field == "CC"


def test_other_faults_stay_as_they_are(folder: Path) -> None:
    for fault in (
        RuntimeError("CUDA error: device-side assert triggered"),
        FileNotFoundError(2, "No such file", "model"),
        subprocess.CalledProcessError(1, ["ptxas"]),
        ConfigError("max_model_len", "is too large"),
    ):
        with pytest.raises(type(fault)) as raised, StartFaults(CPU):
            raise fault
        assert raised.value is fault
        assert lacking_for_triton(fault) is None


@pytest.fixture
def full_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 24 GiB, 22 of them this engine's."""
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib // 2, 24 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 22 * gib)


@pytest.mark.usefixtures("full_card")
@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_runs_out_names_a_setting_and_sizes(fault: Exception) -> None:
    faults = StartFaults(torch.device("cuda"))
    for has_pool, field in ((False, "max_num_batched_tokens"), (True, "gpu_memory_utilization")):
        faults.has_pool = has_pool
        with pytest.raises(ConfigError, match=r"of its 24 GiB this engine had taken 22, and 0.5 were free") as raised:
            faults.__exit__(type(fault), fault, None)
        assert raised.value.field == field and raised.value.__cause__ is fault


@pytest.mark.usefixtures("full_card")
def test_host_memory_that_runs_out_is_not_put_down_to_the_gpu() -> None:
    faults = StartFaults(torch.device("cuda"))
    with pytest.raises(RuntimeError) as fault:
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"max_num_seqs.*into this machine's memory, which has"):
        faults.__exit__(RuntimeError, fault.value, None)


def test_a_kernel_that_a_gpu_has_no_room_for_is_the_models_matter() -> None:
    error = OutOfResources(262144, 101376, "shared memory")
    launchers: dict[str, Callable[[Exception], None]] = {}
    exec(compile("def launch(error): raise error", "engine/kernels/short_attention.py", "exec"), launchers)
    wanted = r"262144 of this GPU's shared memory, of which it has 101376: "
    with pytest.raises(ModelError, match=wanted + r".*head_dim"), StartFaults(CPU):
        launchers["launch"](error)
    with pytest.raises(ModelError, match=wanted + "use a narrower dtype"), StartFaults(CPU):  # not of heads
        raise error.with_traceback(None)


def test_what_triton_needs_is_looked_for_before_anything_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        """As Triton's, it is built when it is first asked for."""

        @property
        def active(self) -> object:
            return build_in(folder)()

    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    loaded = False
    with pytest.raises(ConfigError, match="CC: "), StartFaults(torch.device("cuda")):
        loaded = True
    assert not loaded
