"""The compose file says what Flower programs understand, and takes from containers what they do not need."""

import re
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hedgerow.sim.deploy.processes import program

ROOT = Path(__file__).parents[2]
SERVICES = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
every_service = pytest.mark.parametrize("name", SERVICES)


@lru_cache
def options(of: str) -> set[str]:
    shown = subprocess.run([program(of), "--help"], capture_output=True, text=True, check=True)
    # Long words are wrapped at their hyphens.
    return set(re.findall(r"--[a-z][a-z-]*", re.sub(r"-\n\s+", "-", shown.stdout)))


@every_service
def test_each_argument_is_one_that_the_image_s_program_knows(name: str) -> None:
    service: dict[str, Any] = SERVICES[name]
    image, _, version = service["build"]["args"]["IMAGE"].partition(":")
    told = {argument.partition("=")[0] for argument in service["command"]}
    assert told <= options(
        {"flwr/superlink": "flower-superlink", "flwr/supernode": "flower-supernode"}[image]
    )
    assert f"flwr=={version}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


@every_service
def test_each_container_is_confined_and_finds_its_keys(name: str) -> None:
    service: dict[str, Any] = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "./keys:/keys:ro" in service["volumes"]
    files = re.findall(r"/keys/([\w.]+)", " ".join(service["command"]))
    assert files
    assert set(files) <= {"ca.crt", "server.pem", "server.key", "node0", "node1"}
    assert all(":" not in port or port.startswith("127.0.0.1:") for port in service.get("ports", []))
