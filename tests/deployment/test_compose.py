"""The compose file says what Flower programs understand, and no private key enters an image or a commit."""

import re
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hedgerow.sim import make_credentials, make_edge_credentials
from hedgerow.sim.deploy.processes import program

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
every_service = pytest.mark.parametrize("name", SERVICES)
# Where the compose file and the pages tell users to make keys, relative to the repository.
TOLD = ("deploy/keys", "keys")


def tracked(*paths: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    return listed.stdout.strip("\0").split("\0")


def written_keys(folder: Path) -> dict[str, bool]:
    """Make keys of each kind; their relative paths, and whether each is a private key."""
    make_credentials(folder / "one", 11)
    make_edge_credentials(folder / "edges", [[0], [1, 2]])
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {
        str(file.relative_to(folder / file.relative_to(folder).parts[0])): b"PRIVATE KEY" in file.read_bytes()
        for file in files
    }


# The programs


@lru_cache
def options(of: str) -> set[str]:
    shown = subprocess.run([program(of), "--help"], capture_output=True, text=True, check=True)
    # Long words are wrapped at their hyphens.
    return set(re.findall(r"--[a-z][a-z-]*", re.sub(r"-\n\s+", "-", shown.stdout)))


@every_service
def test_each_argument_is_one_that_the_image_s_program_knows(name: str) -> None:
    service = SERVICES[name]
    image, _, version = service["build"]["args"]["IMAGE"].partition(":")
    told = {argument.partition("=")[0] for argument in service["command"]}
    assert told <= options(
        {"flwr/superlink": "flower-superlink", "flwr/supernode": "flower-supernode"}[image]
    )
    assert f"flwr=={version}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


@every_service
def test_each_container_is_confined_and_has_its_own_files_alone(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(":" not in port or port.startswith("127.0.0.1:") for port in service.get("ports", []))
    # Volumes are named, so that nothing of the host is mounted but the secrets.
    volumes = [volume.partition(":")[0] for volume in service["volumes"]]
    assert set(volumes) <= set(COMPOSE["volumes"])
    others = [other for one, other in SERVICES.items() if one != name]
    assert not {volume.partition(":")[0] for other in others for volume in other["volumes"]} & set(volumes)
    # A private key is in one container, and each file that a program names is there.
    named = set(re.findall(r"/run/secrets/([\w.]+)", " ".join(service["command"])))
    public = {one for one in COMPOSE["secrets"] if one.endswith((".crt", ".pem", ".pub", ".toml"))}
    assert named <= set(service["secrets"])
    assert set(service["secrets"]) - public <= named
    assert not {one for other in others for one in other["secrets"]} & set(service["secrets"]) - public


def test_the_secrets_are_files_that_deploy_keys_writes(tmp_path: Path) -> None:
    written = written_keys(tmp_path)
    for name, secret in COMPOSE["secrets"].items():
        assert secret["file"] == f"./keys/{name}"
        assert name in written
    used = {one for service in SERVICES.values() for one in service["secrets"]}
    assert used == set(COMPOSE["secrets"])


@every_service
def test_a_container_comes_back_with_its_state_and_shows_its_health(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] in ("always", "unless-stopped")
    (mounted,) = [volume.partition(":")[2] for volume in service["volumes"]]
    assert service["environment"]["FLWR_HOME"].startswith(f"{mounted}/")
    told = dict(argument.split("=", 1) for argument in service["command"] if "=" in argument)
    if name == "superlink":
        assert told["--database"].startswith(f"{mounted}/")
    assert service["healthcheck"]["test"][-2:] == [
        "hedgerow.sim.deploy.health",
        told["--health-server-address"],
    ]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


# What enters an image


def dockerfile() -> list[list[str]]:
    """The words of the Dockerfile's instructions."""
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def patterns() -> list[tuple[bool, re.Pattern[str]]]:
    """The patterns of .dockerignore, each with whether it lets in; Go's filepath.Match and ``**``."""
    found = []
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not (text := line.strip()) or text.startswith("#"):
            continue
        glob = text.removeprefix("!").strip("/")
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
        said = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        found.append((text.startswith("!"), re.compile("".join(said.get(p, re.escape(p)) for p in parts))))
    return found


PATTERNS = patterns()
COPIED = [source for words in dockerfile() if words[0] in ("COPY", "ADD") for source in words[1:-1]]


def enters(path: str) -> bool:
    """Whether a path of the repository enters an image, by .dockerignore and the Dockerfile."""
    parents = path.split("/")
    above = ["/".join(parents[: i + 1]) for i in range(len(parents))]
    let_in = True
    for lets_in, pattern in PATTERNS:
        # The last one that fits the path or a folder above it decides.
        if any(pattern.fullmatch(one) for one in above):
            let_in = lets_in
    return let_in and any(source in (".", path) or path.startswith(f"{source}/") for source in COPIED)


def test_every_image_is_built_by_the_one_dockerfile_from_the_folder_of_the_ignore_file() -> None:
    for service in SERVICES.values():
        build = service["build"]
        assert set(build) == {"context", "dockerfile", "args"}
        assert (ROOT / "deploy" / build["context"]).resolve() == ROOT
        assert (ROOT / build["dockerfile"]).resolve() == ROOT / "deploy" / "Dockerfile"
    # It would be read in place of .dockerignore.
    assert not (ROOT / "deploy" / "Dockerfile.dockerignore").exists()
    assert not [words for words in dockerfile() if words[0] == "RUN" and "--mount" in " ".join(words)]


def test_no_private_key_enters_an_image_wherever_in_the_repository_it_lies(tmp_path: Path) -> None:
    keys = [path for path, private in written_keys(tmp_path).items() if private]
    assert {"server.key", "node0", "node10", "edge0/peer.key", "edge1/node2"} <= set(keys)
    folders = {str(parent) for path in tracked() for parent in Path(path).parents} | {*TOLD, "sim/keys"}
    named = [*keys, "ca.key", "a.pem", "id_ecdsa", "node0.key", "keys/node0", ".env", "state.db"]
    assert not [
        f"{folder}/{key}" for folder in folders for key in named if enters(f"{folder}/{key}".lstrip("./"))
    ]


@pytest.mark.parametrize("folder", TOLD)
def test_nothing_of_the_folders_of_keys_enters_an_image(folder: str, tmp_path: Path) -> None:
    assert not [path for path in written_keys(tmp_path) if enters(f"{folder}/{path}")]


def test_what_an_installation_needs_enters() -> None:
    needed = tracked("api", "clients", "sim", "strategies", "tasks", "wire", "pyproject.toml", "setup.py")
    needed += [path for path in tracked("flower_apps") if not path.endswith(".svg")]
    needed += ["README.md", "LICENSE", "constraints.txt", "sim/deploy/health.py"]
    assert [path for path in needed if not enters(path)] == []


# What enters a commit


def ignored(repository: Path, paths: list[str]) -> set[str]:
    """Of some paths those that git ignores."""
    told = subprocess.run(
        ["git", "check-ignore", "--stdin", "-z"],
        cwd=repository, input="\0".join(paths), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode in (0, 1), told.stderr
    return set(told.stdout.strip("\0").split("\0"))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    shutil.copy(ROOT / ".gitignore", folder)
    return folder


@pytest.mark.parametrize("told", TOLD)
def test_git_ignores_all_that_deploy_keys_writes_where_the_pages_put_it(
    told: str, repository: Path, tmp_path: Path
) -> None:
    paths = [f"{told}/{path}" for path in written_keys(tmp_path / "made")]
    assert ignored(repository, paths) == set(paths)


def test_git_ignores_private_keys_that_were_copied_elsewhere(repository: Path, tmp_path: Path) -> None:
    paths = [f"any/{path}" for path, private in written_keys(tmp_path / "made").items() if private]
    assert ignored(repository, paths) == set(paths)


def test_a_folder_of_keys_is_ignored_in_any_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    written_keys(tmp_path / "anywhere")
    shown = subprocess.run(
        ["git", "status", "--short"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout == ""


def test_no_private_key_is_tracked() -> None:
    found = [path for path in tracked() if (ROOT / path).is_file()]
    header = re.compile(rb"^-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/=]{20}", re.MULTILINE)
    assert not [path for path in found if header.search((ROOT / path).read_bytes())]
