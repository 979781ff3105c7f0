"""A registry: what its file may say, and nodes whose claims are held against it."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.clientapp import ClientApp
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from tests.strategies.changing_grid import ChangingGrid, saying
from tests.strategies.quadratic import Quadratics, run

from hedgerow.sim import make_credentials
from hedgerow.sim.engine._compat import NodeInfo
from hedgerow.strategies import FedAvg, Registry, Roster, RosterError
from hedgerow.strategies.registry import RegistryError

pytestmark = pytest.mark.usefixtures("flower_identity")


class AuthenticatedGrid(ChangingGrid):
    """A grid that knows each node's public key, as a SuperLink with authentication does."""

    def __init__(self, app: Any, keys: list[bytes], **options: Any) -> None:
        super().__init__(app, len(keys), **options)
        self._public = keys

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node_id=i, name=info.name, public_key=self._public[self.partitions[i]])
            for info in super().get_nodes()
            for i in (info.node_id,)
        ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """What ``hedgerow deploy keys`` writes for four nodes; their keys as a SuperLink has them."""
    made = make_credentials(tmp_path_factory.mktemp("keys"), 4)
    read = [load_ssh_public_key(node.public.read_bytes()) for node in made.nodes]
    return made.registry, [public_key_to_bytes(key) for key in read]  # type: ignore[arg-type]


def gathered(
    keys: list[bytes], told: list[dict[str, Any]], registry: Registry, quorum: int, **options: Any
) -> Roster:
    grid = AuthenticatedGrid(saying(told), keys, **options)
    return Roster.gather(grid, len(keys), timeout=20, quorum=quorum, registry=registry)


def test_the_file_of_deploy_keys_gives_each_key_its_partition(keys: tuple[Path, list[bytes]]) -> None:
    path, public = keys
    told = [{"partition-id": i, "num-examples": 5} for i in range(4)]
    roster = gathered(public, told, Registry.read(path), 4)
    assert [node.partition_id for node in roster.nodes] == [0, 1, 2, 3]
    assert not roster.take_refusals()


def test_who_claims_anothers_partition_is_refused_and_its_owner_has_it(
    keys: tuple[Path, list[bytes]],
) -> None:
    path, public = keys
    told = [{"partition-id": 1, "num-examples": 5}, *({"partition-id": i} for i in (1, 2, 3))]
    roster = gathered(public, told, Registry.read(path), 3)
    assert roster.present == [1, 2, 3]
    assert roster.nodes[1].num_examples is None
    assert roster.take_refusals() == {"another partition than registered": 1}


def test_a_stranger_is_refused_whatever_it_says(keys: tuple[Path, list[bytes]]) -> None:
    path, public = keys
    three = Registry(Registry.read(path).nodes[:3])
    told = [{"partition-id": i, "name": f"node-{i}"} for i in range(4)]
    roster = gathered(public, told, three, 3)
    assert roster.present == [0, 1, 2]
    assert roster.take_refusals() == {"not registered": 1}
    with pytest.raises(RosterError, match="left out: 4 x not registered"):
        gathered([b""] * 4, told, three, 3)


def test_role_group_and_weight_are_the_registrys(tmp_path: Path, keys: tuple[Path, list[bytes]]) -> None:
    path, public = keys
    file = tmp_path / "nodes.toml"
    lines = [(path.parent / f"node{i}.pub").read_text() for i in range(4)]
    file.write_text(
        f'[[node]]\nkey = "{lines[0].strip()}"\nrole = "hospital"\ngroup = "west"\n'
        f'[[node]]\nkey = "{lines[1].strip()}"\nrole = "hospital"\n'
        f'[[node]]\nkey = "{lines[2].strip()}"\ngroup = "east"\n'
        f'[[node]]\nkey = "{lines[3].strip()}"\nmax-examples = 50\n'
    )
    told: list[dict[str, Any]] = [
        {"partition-id": 0},
        {"partition-id": 1, "role": "device"},
        {"partition-id": 2, "group": "west"},
        {"partition-id": 3, "num-examples": 2**53},
    ]
    roster = gathered(public, told, Registry.read(file), 2)
    assert (roster.nodes[0].role, roster.nodes[0].group) == ("hospital", "west")
    assert roster.nodes[3].num_examples == 50
    refused = {"another role than registered": 1, "another group than registered": 1}
    assert roster.take_refusals() == refused


def test_a_name_that_its_key_was_registered_with_is_found(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text('[[node]]\nname = "ward-1"\npartition = 1\n[[node]]\nname = "ward-2"\n')
    told = [{"name": "ward-1"}, {"name": "anything"}, {"partition-id": 1, "name": "ward-1"}]
    roster = gathered([b""] * 3, told, Registry.read(file), 2, registered={0: "ward-1", 1: "ward-2"})
    assert {node.name: node.partition_id for node in roster.nodes if not node.vacant} == {
        "ward-1": 1,
        "ward-2": 0,
    }
    assert roster.take_refusals() == {"not registered": 1}


def test_a_weight_told_later_is_capped_by_the_registry(tmp_path: Path) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text("".join(f'[[node]]\nname = "n{i}"\nmax-examples = 10\n' for i in range(3)))
    problem = Quadratics(sizes=[10, 10, 2**40], centres=[0, 0, 9])
    names = {i: f"n{i}" for i in range(3)}
    grid = ChangingGrid(problem.client_app(), 3, registered=names)
    strategy = FedAvg(num_clients=3, min_available_nodes=3, registry=Registry.read(file), max_weight_ratio=0)
    run(strategy, problem, 1, grid=grid)
    assert [strategy.federation.limits.weight_of(i) for i in range(3)] == [10, 10, 10]


def test_nodes_that_do_not_say_who_they_are_have_no_registry(keys: tuple[Path, list[bytes]]) -> None:
    path, public = keys
    grid = AuthenticatedGrid(ClientApp(), public)
    with pytest.raises(RosterError, match="No node introduces itself, which a registry requires"):
        Roster.gather(grid, 4, timeout=5, registry=Registry.read(path))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("node = 3", r"must hold tables \[\[node\]\] alone"),
        ("[[node]]\nname = 'a'\n[other]", r"must hold tables \[\[node\]\] alone"),
        ("[[node", "no TOML"),
        ("[[node]]\nrole = 'x'", "node 0 must have a key or a name"),
        ("[[node]]\nname = 'a'\npartition = -1", "node 0: partition must be an integer from 0.*got -1"),
        ("[[node]]\nname = 'a'\npartition = true", "node 0: partition must be .*got True"),
        ("[[node]]\nname = ''", "node 0: name must be a text.*got ''"),
        ("[[node]]\nname = 'a'\n[[node]]\nname = 'a'", "name 'a' stands twice"),
        (
            "[[node]]\nname = 'a'\npartition = 1\n[[node]]\nname = 'b'\npartition = 1",
            "partition 1 stands twice",
        ),
        ("[[node]]\nkey = 'nowhere.pub'", "key must be an OpenSSH public key, .*got 'nowhere.pub'"),
        ("[[node]]\nkey = 'ssh-ed25519 AAAA'", "key must be an OpenSSH public key, .*got 'ssh-ed25519 AAAA'"),
        (
            "[[node]]\nname = 'a'\nweight = 3",
            "unknown key 'weight'; known keys are key, name, partition",
        ),
        ("[[node]]\nname = 'a'\nmax-examples = 0", "max-examples must be an integer from 1.*got 0"),
    ],
)
def test_a_bad_file_is_one_error_that_names_it(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "nodes.toml"
    file.write_text(text)
    with pytest.raises(RegistryError, match=error) as raised:
        Registry.read(file)
    assert str(raised.value).startswith(str(file))


def test_no_file_is_one_error_and_no_name_is_no_registry(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="No such file"):
        Registry.read(tmp_path / "nodes.toml")
    assert Registry.named("") is None
