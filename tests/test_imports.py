"""Tests import public names, so that a module can move without them.

A name is public where ``__all__`` of a package lists it; it is imported from the outermost package that does.
What no package lists is a part: tests of its own room import it from its module, and few others, named below.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Real processes play what hedgerow.sim.deploy starts.
ROOMS = {"deployment": "sim"}
# Modules that tests outside their room import.
ELSEWHERE = {
    # What every app's answers are charged, held against what the guard decides.
    "hedgerow.clients.mods.guard": {"contracts/test_charges"},
    "hedgerow.wire.failures": {"contracts/test_charges", "contracts/test_disclosed"},
    # Both sides of a message, held against each other.
    "hedgerow.clients.hsgd.match_key": {"flower_apps/test_hsgd_own"},
    "hedgerow.strategies.hsgd.exchange": {"flower_apps/test_hsgd"},
    "hedgerow.wire.discrete_gaussian": {"clients/test_grid_noise", "strategies/test_sum_noise"},
    "hedgerow.wire.edge_servers": {"strategies/sd_feel/test_lying_edges"},
    "hedgerow.wire.links.peers": {"strategies/sd_feel/test_direct"},
    # The fate of one node's messages, as faults draw it.
    "hedgerow.sim.engine.faults": {"contracts/test_failures"},
    "hedgerow.wire.fixed_point": {"clients/hsgd/test_match_key"},
    "hedgerow.wire.masked_sums": {
        "clients/sums",
        "clients/test_masks_bind",
        "clients/test_policies",
        "strategies/test_secure_sums",
        "strategies/test_sum_noise",
        "strategies/test_summed_methods",
    },
    "hedgerow.wire.message_types": {
        "clients/hsgd/test_own",
        "clients/test_policies",
    },
    "hedgerow.wire.sealed": {"strategies/gossip/test_sealed_runs", "strategies/hsgd/test_sealed_runs"},
    "hedgerow.wire.sign_shares": {"strategies/fedmud/test_algorithm"},
    # The global generators and what models keep are nobody's room.
    "hedgerow.kept_values": {"clients/training/test_kept_values"},
    "hedgerow.clients.training.stack": {"contracts/test_models"},
    "hedgerow.global_draws": {
        "clients/training/test_epochs",
        "clients/training/test_own",
        "clients/training/test_proof",
    },
    # Patched: a simulated node is a device, a call is counted.
    "hedgerow.clients.device": {"sim/cli/test_new"},
    "hedgerow.clients.gossip.node": {"strategies/gossip/test_exposure"},
    "hedgerow.clients.hsgd.node": {"strategies/hsgd/test_rejected_updates"},
    "hedgerow.clients.local_task": {"sim/cli/test_new"},
    "hedgerow.tasks.models": {"clients/training/test_stack", "wire/test_seeds"},
    "hedgerow.tasks.partitions": {"wire/test_seeds"},
    "hedgerow.tasks.regression": {"wire/test_seeds"},
    "hedgerow.wire.process": {
        "contracts/test_charges",
        "clients/test_guard",
        "clients/test_masks_bind",
        "clients/test_policies",
        "conftest",
        "sim/engine/test_workers",
    },
    # What all that is public refuses.
    "hedgerow.clients.policy": {"contracts/test_charges", "contracts/test_refusals"},
    # Whether two rooms agree.
    "hedgerow.clients.releases": {"strategies/gossip/test_exposure"},
    "hedgerow.sim.engine._compat": {
        "flower_apps/test_sd_feel",
        "strategies/changing_grid",
        "strategies/hsgd/test_failures",
        "strategies/test_registry",
    },
    "hedgerow.sim.engine.grid": {"strategies/recording_grid"},
    "hedgerow.sim.engine.nodes": {
        "strategies/gossip/test_exposure",
        "strategies/gossip/test_sealed_runs",
    },
    "hedgerow.sim.runs.common_settings": {"clients/training/test_arithmetic", "flower_apps/test_settings"},
    "hedgerow.tasks.threads": {"clients/training/test_sgd"},
    # Formats and settings that are written down outside the package.
    "hedgerow.sim.runs.checkpoint": {"docs/test_formats"},
    "hedgerow.sim.runs.results": {"docs/test_formats", "test_results"},
    "hedgerow.sim.runs.compare": {"flower_apps/test_apps", "test_results"},
    "hedgerow.sim.runs.folder": {"docs/test_formats"},
    "hedgerow.sim.runs.kinds": {"contracts/test_refusals", "flower_apps/test_fuzz_settings"},
    "hedgerow.sim.runs.plan": {
        "contracts/plays",
        "contracts/test_refusals",
        "flower_apps/test_fuzz_settings",
        "flower_apps/test_gpu",
        "golden/play",
    },
    "hedgerow.sim.runs.settings_files": {"flower_apps/test_apps"},
    "hedgerow.wire.extras": {"flower_apps/test_light_node"},
}


def test_tests_import_what_is_public() -> None:
    told = [mistake for file, source in sources() for mistake in mistakes(file, source)]
    assert not told, "\n".join(told)


@pytest.mark.parametrize(
    ("file", "source", "told"),
    [
        ("strategies/test_x", "from hedgerow.wire.records import view", "view is listed by hedgerow.wire"),
        ("wire/test_records", "from hedgerow.wire.records import view", "view is listed by hedgerow.wire"),
        ("wire/test_x", "from hedgerow.clients.hsgd import Party", "Party is listed by hedgerow.clients"),
        (
            "test_x",
            "def f():\n    from hedgerow.sim.runs.plan import toml_text",
            "hedgerow.sim.runs.plan is a part",
        ),
        ("sim/test_x", "import hedgerow.clients.links", "hedgerow.clients.links is a part"),
        (
            "sim/test_x",
            "from hedgerow.clients.training import stack",
            "hedgerow.clients.training.stack is a part",
        ),
        ("sim/test_x", "from hedgerow.clients import stack", "hedgerow.clients lists no stack"),
    ],
)
def test_another_import_is_told_with_its_public_place(file: str, source: str, told: str) -> None:
    (mistake,) = mistakes(file, source)
    assert mistake.startswith(f"tests/{file}.py: {told}")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("strategies/test_x", "from hedgerow.wire import view"),
        ("strategies/test_x", "from hedgerow.strategies.fedmud import SYNCS"),
        ("strategies/hsgd/test_x", "from hedgerow.strategies.topology import graph"),
        ("deployment/test_x", "import hedgerow.sim.deploy.local"),
        ("clients/test_x", "import hedgerow.clients, torch"),
        # Not what hedgerow.clients calls Memory.
        ("clients/hsgd/test_x", "from hedgerow.clients.hsgd.messages import PartyMemory"),
    ],
)
def test_public_names_and_parts_of_the_own_room_are_imported(file: str, source: str) -> None:
    assert list(mistakes(file, source)) == []


def test_every_exception_is_in_use() -> None:
    used = {(module, file) for file, source in sources() for module, _ in imports(source)}
    assert {(module, file) for module, files in ELSEWHERE.items() for file in files} - used == set()


@pytest.mark.parametrize("room", ["strategies", "clients"])
@pytest.mark.parametrize(
    "method", sorted(file.parent.name for file in ROOT.glob("flower_apps/*/pyproject.toml"))
)
def test_nothing_in_a_room_imports_a_method_but_the_method(room: str, method: str) -> None:
    name = method.replace("-", "_")
    # A folder, or one file.
    own = {*(ROOT / room).glob(f"{name}/**/*.py"), *(ROOT / room).glob(f"{name}.py")}
    assert own, f"{room}/{name} is empty"
    others = {*(ROOT / room).rglob("*.py")} - own - {ROOT / room / "__init__.py"}
    found = [(str(file), module) for file in others for module, _ in imports(file.read_text())]
    assert not [pair for pair in found if f"{pair[1]}.".startswith(f"hedgerow.{room}.{name}.")]


def test_no_file_of_sim_names_a_method() -> None:
    apps = [file.parent.name for file in ROOT.glob("flower_apps/*/pyproject.toml")]
    assert apps
    # However a name is written, as a word of its own or as a part of one: sd-feel, SD_FEEL, SDFeel.
    name = re.compile("|".join(app.replace("-", "[-_ ]?") for app in apps), re.IGNORECASE)
    files = [file for file in (ROOT / "sim").rglob("*.*") if file.suffix in (".py", ".js", ".html", ".css")]
    told = [f"{file}: {found[0]}" for file in files for found in name.finditer(file.read_text())]
    told += [str(file) for file in files if name.search(file.name)]
    assert not told, "\n".join(told)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions, and those for type checkers alone, count too."""
    files = {
        f"hedgerow.{file.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}": file
        for room in ("strategies", "clients", "wire", "tasks", "sim")
        for file in (ROOT / room).rglob("*.py")
        if file.name != "__init__.py"
    }
    graph = {
        module: {
            one
            for package, name in imports(file.read_text())
            for one in (package, f"{package}.{name}")
            if one in files and one != module
        }
        for module, file in files.items()
    }
    assert sum(map(len, graph.values())) > 1000
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for room in ("strategies", "clients", "wire", "tasks", "sim", "flower_apps"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(file.relative_to(ROOT).as_posix())
    # Each method's or app's own.
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert twice.keys() <= {"Algorithm", "Settings", "State"}, twice


def sources() -> Iterator[tuple[str, str]]:
    """Yield each file's name below ``tests/``, without its suffix, and its text."""
    for path in sorted(ROOT.glob("tests/**/*.py")):
        yield path.relative_to(ROOT / "tests").with_suffix("").as_posix(), path.read_text()


def mistakes(file: str, source: str) -> Iterator[str]:
    folder = file.partition("/")[0]
    for module, name in imports(source):
        if file in ELSEWHERE.get(module, ()):
            continue
        place, room = place_of(module, name), module.split(".")[1]
        if place not in (None, module):
            yield f"tests/{file}.py: {name} is listed by {place}: import it from there, not from {module}"
        elif place is None and name and not is_part(module):
            yield f"tests/{file}.py: {module} lists no {name}"
        elif (
            place is None and is_part(module) and not is_method(module) and room != ROOMS.get(folder, folder)
        ):
            yield (
                f"tests/{file}.py: {module} is a part of hedgerow.{room}: list {name or 'what it has'} in an "
                f"__init__.py there, if users want it, or test it in tests/{room}/"
            )


@cache
def imports(source: str) -> tuple[tuple[str, str], ...]:
    """Return modules of ours and the names that are imported from them; no name for a module itself."""
    return tuple(imported(source))


def imported(source: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in found:
            if not module.startswith("hedgerow."):
                continue
            inner = f"{module}.{name}"
            yield (inner, "") if name and name not in listed(module) and is_part(inner) else (module, name)


def place_of(module: str, name: str) -> str | None:
    """Return the outermost package that lists what ``module`` calls ``name``."""
    parts = module.split(".")
    for end in range(2, len(parts) + 1):
        package = ".".join(parts[:end])
        # Another thing may have the same name further in.
        if name in listed(package) and (
            package == module or getattr(import_module(package), name) is getattr(import_module(module), name)
        ):
            return package
    return None


def is_method(module: str) -> bool:
    """Return whether a module is all that a room has of an app's method, and so its public place."""
    return module.rpartition(".")[2] in {
        file.parent.name.replace("-", "_") for file in ROOT.glob("flower_apps/*/pyproject.toml")
    }


def is_part(module: str) -> bool:
    return ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py").is_file()


@cache
def listed(package: str) -> frozenset[str]:
    """Return what a package's ``__all__`` lists, without importing it."""
    file = ROOT.joinpath(*package.split(".")[1:], "__init__.py")
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
