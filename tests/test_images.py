"""What the images are built from agrees with the project."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from streamkv.config import EngineConfig, GatewayConfig
from streamkv.settings import OTHER_VARIABLES, settings

ROOT = Path(__file__).parents[1]
ENGINE_ONLY = {"torch", "transformers", "safetensors", "llguidance"}
"""Dependencies of which the gateway's image has none: they compute, or are needed by what computes."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_.-]", line)[0].lower() for line in requirements if line and not line.startswith("#")}


def test_the_gateway_image_has_every_dependency_but_those_that_compute() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = names((ROOT / "docker" / "gateway.txt").read_text().splitlines())
    assert installed == names(project["dependencies"]) - ENGINE_ONLY
    code = "\n".join(path.read_text() for folder in ("gateway", "streamkv") for path in (ROOT / folder).rglob("*.py"))
    assert not re.search(rf"^\s*(?:import|from) (?:{'|'.join(ENGINE_ONLY)})\b", code, re.MULTILINE)


def test_every_file_that_a_dockerfile_copies_is_there_and_reaches_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for dockerfile in (ROOT / "docker").glob("*.Dockerfile"):
        for line in re.findall(r"^COPY (?!--from)(.*)$", dockerfile.read_text(), re.MULTILINE):
            *sources, _ = [word for word in line.split() if not word.startswith("--")]
            for source in sources:
                assert (ROOT / source).exists(), f"{dockerfile.name}: {source}"
                assert f"!{source.split('/')[0]}" in ignored, f"{dockerfile.name}: {source} is ignored"


def test_compose_names_settings_files_and_volumes_that_there_are() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    known = {each.variable for kind in (EngineConfig, GatewayConfig) for each in settings(kind).values()}
    for name, service in compose["services"].items():
        ours = {variable for variable in service.get("environment", {}) if variable.startswith("STREAMKV_")}
        assert ours <= known | OTHER_VARIABLES, name
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in compose["volumes"], mount
    gpu = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]["engine"]
    assert set(gpu["environment"]) <= known
    assert set(compose["services"]) - {"engine", "gateway"} == {"prometheus", "grafana"}
    assert all(compose["services"][name]["profiles"] == ["monitoring"] for name in ("prometheus", "grafana"))


def test_the_gpu_s_arguments_are_the_dockerfile_s_and_its_extra_the_project_s() -> None:
    args = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]["engine"]["build"]["args"]
    dockerfile = (ROOT / "docker" / "engine.Dockerfile").read_text()
    assert set(args) <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert args["EXTRAS"] in extras


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, ["--extra-index-url https://index.example torch==2", "--find-links /wheels ."]),
        ({"TORCH_INDEX": "", "EXTRAS": "gpu"}, ["constraints.txt torch==2", "--find-links /wheels .[gpu]"]),
    ],
)
def test_the_engine_s_build_installs_what_its_arguments_say(
    tmp_path: Path, arguments: dict[str, str], wanted: list[str]
) -> None:
    """The commands of the Dockerfile, in a shell in which pip and apt-get only say what they were told."""
    for name in ("pip", "apt-get"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} $@\n")
        (tmp_path / name).chmod(0o755)
    dockerfile = (ROOT / "docker" / "engine.Dockerfile").read_text().replace("\\\n", "")
    commands = re.findall(r"^RUN (?:--mount=\S+ +)*(.*)$", dockerfile, re.MULTILINE)
    environment = {
        "TORCH": "torch==2",
        "TORCH_INDEX": "https://index.example",
        "EXTRAS": "",
        "PACKAGES": "",
        **arguments,
    }
    told = [
        subprocess.run(
            ["/bin/sh", "-c", command],
            env={**environment, "PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for command in commands
        if "venv" not in command
    ]
    assert [line.endswith(end) for line, end in zip(told, [*wanted, ""], strict=True)] == [True] * 3, told
    assert told[2] == ""


@pytest.mark.docker
def test_compose_merges_the_gpu_into_the_engine_alone() -> None:
    """By docker compose itself, which needs no Docker engine for it."""
    compose = ["docker", "compose"]
    if shutil.which("docker") is None or subprocess.run([*compose, "version"], capture_output=True).returncode:
        pytest.skip("no docker compose here")
    files = ["-f", "compose.yaml", "-f", "compose.gpu.yaml"]
    done = subprocess.run([*compose, *files, "config", "--format", "json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    services = json.loads(done.stdout)["services"]
    engine, gateway = services["engine"], services["gateway"]
    (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"], device["count"]) == ("nvidia", ["gpu"], 1)
    assert engine["build"]["args"]["TORCH_INDEX"] == "" and engine["environment"]["STREAMKV_DEVICE"] == "cuda"
    assert engine["read_only"] and engine["cap_drop"] == ["ALL"] and engine["image"] != gateway["image"]
    assert "deploy" not in gateway and "STREAMKV_DEVICE" not in gateway["environment"]
