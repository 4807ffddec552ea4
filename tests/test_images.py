"""What the images are built from agrees with the project."""

import re
import tomllib
from pathlib import Path

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
    assert set(compose["services"]) - {"engine", "gateway"} == {"prometheus", "grafana"}
    assert all(compose["services"][name]["profiles"] == ["monitoring"] for name in ("prometheus", "grafana"))
