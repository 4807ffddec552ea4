"""The command line: what it starts, and that it is quick to say what is wrong."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from streamkv import cli
from streamkv.config import EngineConfig, GatewayConfig, load

ROOT = Path(__file__).resolve().parents[2]


class Started(Exception):
    """Instead of a module's run: which one, and with which arguments."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_module(name: str, run_name: str, alter_sys: bool) -> None:
        assert run_name == "__main__" and alter_sys
        raise Started(name, sys.argv[1:])

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(sys, "argv", ["streamkv"])
    for name in [name for name in os.environ if name.startswith("STREAMKV_")]:
        monkeypatch.delenv(name)


def start(*words: str) -> tuple[str, list[str]]:
    with pytest.raises(Started) as caught:
        cli.main(words)
    module, argv = caught.value.args
    return module, argv


def python(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_serve_starts_the_gateway_with_an_engine(started: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMKV_BLOCK_SIZE", "8")
    module, argv = start("serve", "--port", "9000", "--model", "m", "--max-queue=5")
    split = argv.index("--with-engine")
    assert module == "gateway"
    assert load(GatewayConfig, argv[:split], {}) == GatewayConfig(port=9000, model="m")
    assert load(EngineConfig, argv[split + 1 :], {}) == EngineConfig(block_size=8, model="m", max_queue=5)


def test_engine_and_gateway_get_their_flags_as_they_are(started: None) -> None:
    assert start("engine", "--block-size", "8") == ("engine", ["--block-size", "8"])
    assert start("gateway", "--port=1") == ("gateway", ["--port=1"])


def test_the_tools_are_started_by_name_and_exist(started: None) -> None:
    for command in ("chat", "bench", "fetch", "keygen"):
        module, argv = start(command, "--flag", "x")
        assert argv == ["--flag", "x"]
        assert ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file()
    assert start("simulate", "--seed", "1") == ("engine.simulation", ["--seed", "1"])
    assert (ROOT / "engine/simulation/__main__.py").is_file()


@pytest.mark.parametrize("command", ["serve", "engine", "gateway"])
def test_a_wrong_setting_ends_with_status_2_before_anything_starts(
    command: str, started: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--heartbeat-s", "0"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "streamkv: --heartbeat-s: must be a number over 0 and at most 60, got 0.0\n"


def test_ctrl_c_before_the_program_listens_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.runpy, "run_module", interrupted)
    assert cli.main(["serve"]) == 130


def test_an_unknown_command_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["benhc"]) == 2
    assert "no such command: benhc; did you mean bench?" in capsys.readouterr().err


def test_help_lists_every_command_and_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {command} " in shown for command in cli.COMMANDS)
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"streamkv {cli.VERSION}\n")


@pytest.mark.parametrize("command", ["serve", "engine", "gateway"])
def test_help_of_a_process_loads_neither_torch_nor_aiohttp(command: str) -> None:
    code = (
        "import sys\nfrom streamkv.cli import main\n"
        f"try: main([{command!r}, '--help'])\nexcept SystemExit as ended: assert ended.code == 0\n"
        "assert not {'torch', 'aiohttp', 'zmq', 'engine', 'gateway', 'asyncio'} & sys.modules.keys()"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"streamkv {command}: " in done.stdout and "--model TEXT" in done.stdout


def test_python_m_streamkv_is_the_same() -> None:
    done = python("-m", "streamkv", "--version")
    assert (done.returncode, done.stdout) == (0, f"streamkv {cli.VERSION}\n")
    assert python("-m", "streamkv", "serve", "--prot=1").returncode == 2
    assert "usage: streamkv bench" in python("-m", "streamkv", "bench", "--help").stdout
    assert "usage: streamkv simulate" in python("-m", "streamkv", "simulate", "--help").stdout


def test_keygen_makes_a_pair_once(tmp_path: Path) -> None:
    file = tmp_path / "engine.key"
    done = python("-m", "streamkv", "keygen", str(file))
    assert done.returncode == 0 and len(done.stdout.strip()) == 40
    assert len(file.read_text().strip()) == 40 and file.stat().st_mode & 0o077 == 0
    again = python("-m", "streamkv", "keygen", str(file))
    assert again.returncode == 2 and str(file) in again.stderr
