"""The house keeps its floors: imports point down, rooms do not go round, and every module stands alone."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("streamkv", "engine", "gateway")

# From top to bottom. A module may import what stands on its own floor or below. "*" is every room not named.
FLOORS: Mapping[str, list[set[str]]] = {
    "engine": [
        {"__main__"},
        {"loop", "simulation"},
        {"requests", "snapshot"},
        {"figures"},
        {"execution", "scheduling"},
        {"models", "kv", "publisher", "inbox", "intake", "loading", "executor"},
        {
            "layers",
            "plan",
            "sequence",
            "stats",
            "memory",
            "transfer",
            "kept_logprobs",
            "flight_record",
            "quarantine",
            "succession",
        },
        {"kernels", "batch"},
    ],
    "gateway": [
        {"__main__"},
        {"process", "supervised_engine"},
        {"app", "crew"},
        {"routes", "middlewares"},
        {"keys"},
        {"generation", "supervisor", "errors"},
        {"*"},
    ],
    "streamkv": [
        {"__main__"},
        {"cli", "tools"},
        {"client"},
        {"config"},
        {
            *{"settings", "model_files", "gguf_header", "gguf_vocabulary", "transport", "log", "protocol", "sampling"},
            *{"errors", "lengths", "process"},
        },
    ],
}
FORBIDDEN_LIBRARIES: Mapping[str, set[str]] = {
    "engine.scheduling": {"torch", "triton", "numpy"},
    "engine.kv": {"torch", "triton", "numpy"},
    "engine.simulation": {"torch", "triton", "numpy"},
    "engine.plan": {"torch", "triton"},
    "engine.sequence": {"torch", "triton"},
    "gateway": {"torch", "triton", "accelerate"},
    "streamkv": {"torch", "triton", "transformers"},
}
AIOHTTP_ROOMS = ("gateway", "streamkv.client", "streamkv.tools")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}


def modules_of(root: Path) -> dict[str, Path]:
    """Module name → file, of all our packages under a folder."""
    found: dict[str, Path] = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str, path: Path, modules: Mapping[str, Path]) -> Iterator[tuple[int, str]]:
    """(line, imported module) for every import anywhere in the file, those for typing and in functions too."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield node.lineno, name if name in modules else source


def floor_of(module: str) -> int:
    """0 is the top floor. Raises KeyError for a module that has none."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    for number, rooms in enumerate(FLOORS[package]):
        if room in rooms or "*" in rooms:
            return number
    raise KeyError(f"{module} has no floor: give it one in FLOORS, and in docs/architecture.md")


def broken_rules(root: Path) -> list[str]:
    """Everything in the house that goes up, round, or through a wall."""
    modules = modules_of(root)
    broken: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module.partition(".")[0]
        for line, name in imports_of(module, path, modules):
            where = f"{path.relative_to(root)}:{line}: {module} imports {name}"
            library = name.partition(".")[0]
            if library not in PACKAGES:
                broken += [
                    f"{where}, which is not for {room}"
                    for room, libraries in FORBIDDEN_LIBRARIES.items()
                    if library in libraries and f"{module}.".startswith(f"{room}.")
                ]
                if library == "aiohttp" and not f"{module}.".startswith(tuple(f"{room}." for room in AIOHTTP_ROOMS)):
                    broken.append(f"{where}: only the gateway and our own clients use it")
                continue
            graph.setdefault(module, set()).add(name)
            if library not in (package, "streamkv"):
                broken.append(f"{where}: engine and gateway know each other only through streamkv")
            elif library != package and name.startswith(("streamkv.tools", "streamkv.client", "streamkv.cli")):
                broken.append(f"{where}: clients and the command line are not imported")
            elif library == package and "." in name and "." in module and floor_of(name) < floor_of(module):
                broken.append(f"{where}, which stands above it")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        broken.append("imports go round: " + " → ".join(error.args[1]))
    return broken


def write_house(root: Path, files: Mapping[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def test_imports_point_down_and_never_round() -> None:
    assert broken_rules(ROOT) == []


def test_every_module_has_a_floor() -> None:
    for module in modules_of(ROOT):
        if "." in module:
            floor_of(module)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"engine/kv/pool.py": "from engine.scheduling import queue", "engine/scheduling/queue.py": ""}, "above it"),
        ({"engine/plan.py": "def f():\n    import engine.loop", "engine/loop.py": ""}, "above it"),
        (
            {
                "gateway/sse.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from gateway import app",
                "gateway/app.py": "",
            },
            "above it",
        ),
        ({"gateway/routes/chat.py": "from ..app import make", "gateway/app.py": ""}, "above it"),
        ({"gateway/sse.py": "import engine.plan", "engine/plan.py": ""}, "only through streamkv"),
        ({"engine/loop.py": "from gateway.sse import x", "gateway/sse.py": ""}, "only through streamkv"),
        ({"engine/kv/a.py": "import engine.kv.b", "engine/kv/b.py": "from engine.kv import a"}, "go round"),
        ({"engine/loop.py": "import aiohttp"}, "our own clients"),
        ({"engine/kv/pool.py": "import torch.nn"}, "not for engine.kv"),
        ({"gateway/sse.py": "def f():\n    from torch import nn"}, "not for gateway"),
        ({"streamkv/log.py": "import aiohttp"}, "our own clients"),
        ({"engine/loop.py": "from streamkv.client import Client", "streamkv/client.py": ""}, "are not imported"),
        ({"streamkv/errors.py": "import streamkv.config", "streamkv/config.py": ""}, "above it"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, files: dict[str, str], complaint: str) -> None:
    broken = broken_rules(write_house(tmp_path, files))
    assert len(broken) == 1 and complaint in broken[0], broken


def test_a_module_without_a_floor_is_found() -> None:
    with pytest.raises(KeyError, match=r"engine\.attic has no floor"):
        floor_of("engine.attic")


def test_package_files_are_empty() -> None:
    """A name has one address."""
    assert [
        str(path) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py") if path.read_text()
    ] == []


def test_files_are_named_for_what_is_in_them() -> None:
    folders = [ROOT / name for name in (*PACKAGES, "tests", "docs")]
    vague = [str(path) for folder in folders for path in folder.rglob("*") if path.stem in VAGUE_NAMES]
    assert vague == []


# Reads module names from its arguments, and imports each in a process of its own that has loaded none of our modules.
# What argv[1] names is loaded once before, since torch takes seconds; a library loaded early hides no fault of ours.
IMPORT_EACH = """
import importlib, json, os, sys, traceback
from importlib import import_module
preload, forbidden, *modules = sys.argv[1:]
for name in filter(None, preload.split(",")):
    import_module(name)
faults = {}
for module in modules:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            import_module(module)
            found = [name for name in filter(None, forbidden.split(",")) if name in sys.modules]
            text = f"loads {found}" if found else ""
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if text or status:
        faults[module] = text or f"ended with status {status}"
print(json.dumps(faults))
"""


def faults_of(modules: list[str], preload: str, forbidden: str, root: Path = ROOT) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, preload, forbidden, *modules],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def modules_under(*prefixes: str) -> list[str]:
    return [m for m in modules_of(ROOT) if m.startswith(prefixes) and not m.endswith("__main__")]


@pytest.mark.long
@pytest.mark.timeout(320)
def test_each_gateway_module_can_be_imported_alone_and_without_torch() -> None:
    libraries = "aiohttp.web,tokenizers,jinja2,gguf"
    assert faults_of(modules_under("gateway"), preload=libraries, forbidden="torch,engine") == {}


def test_each_shared_module_can_be_imported_alone_and_brings_in_no_heavy_library() -> None:
    clients = modules_under("streamkv.client", "streamkv.tools")
    shared = [module for module in modules_under("streamkv") if module not in clients]
    assert faults_of(shared, preload="", forbidden="torch,transformers,aiohttp,engine,gateway") == {}
    assert faults_of(clients, preload="", forbidden="torch,transformers,matplotlib,engine,gateway") == {}


def test_each_scheduling_and_kv_module_can_be_imported_alone_and_without_torch() -> None:
    modules = modules_under("engine.scheduling", "engine.kv", "engine.simulation", "engine.plan", "engine.sequence")
    assert faults_of(modules, preload="", forbidden="torch,aiohttp,gateway") == {}


@pytest.mark.long
@pytest.mark.timeout(320)
def test_each_engine_module_can_be_imported_alone_and_without_aiohttp() -> None:
    assert faults_of(modules_under("engine"), preload="torch", forbidden="aiohttp,gateway") == {}


def test_a_module_that_does_not_stand_alone_is_found(tmp_path: Path) -> None:
    write_house(tmp_path, {"a.py": "import json", "b.py": "import no_such_module", "c.py": "import decimal"})
    faults = faults_of(["a", "b", "c"], preload="", forbidden="decimal", root=tmp_path)
    assert set(faults) == {"b", "c"} and "no_such_module" in faults["b"] and "decimal" in faults["c"]
