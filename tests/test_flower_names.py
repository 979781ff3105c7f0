"""Flower's private names are used in one file alone.

Public is what ``__all__`` of Flower's packages lists. What else a new Flower changes, changes one file here.
"""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from hedgerow.sim import flower_identity

ROOT = Path(__file__).parents[1]
PRIVATE = ROOT / "sim" / "engine" / "_compat.py"
SHIPPED = ("wire", "tasks", "strategies", "clients", "sim", "flower_apps", "benchmarks", "docs", "deploy")
PACKAGES = ["flwr", "flwr.app", "flwr.clientapp", "flwr.clientapp.mod", "flwr.common", "flwr.simulation"]
PACKAGES += ["flwr.serverapp", "flwr.serverapp.strategy"]
# The legacy API, which other people's apps are still written in.
PACKAGES += ["flwr.client", "flwr.client.mod", "flwr.server", "flwr.server.strategy", "flwr.server.workflow"]


@pytest.fixture(scope="module")
def attributes() -> set[str]:
    """The private attributes of the objects that Flower hands out."""
    with flower_identity(7):
        message = Message(RecordDict(), 2, "query")
    records = (RecordDict(), ArrayRecord([]), ConfigRecord(), MetricRecord())
    objects = (message, message.metadata, ClientApp(), ServerApp(), *records)
    identity = {"_run_id", "_node_id", "_task_id"}
    found = {name for one in objects for name in vars(one) if re.match("_[a-z]", name)}
    # A name of the suite's own too.
    return (found | identity) - {"_strategy"}


def private_names(tree: ast.AST, attributes: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"flwr\b", node.module or ""):
            listed = import_module(str(node.module)).__all__ if node.module in PACKAGES else ()
            yield from (f"{node.module}.{one.name}" for one in node.names if one.name not in listed)
        elif isinstance(node, ast.Import):
            yield from (
                one.name for one in node.names if re.match(r"flwr\b", one.name) and one.name not in PACKAGES
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = re.fullmatch(r"flwr(\.\w+)+", node.value) and node.value not in PACKAGES
            if module or node.value in attributes:
                yield repr(node.value)
        elif isinstance(node, ast.Attribute) and node.attr in attributes and not is_self(node.value):
            yield f".{node.attr}"


def is_self(node: ast.expr) -> bool:
    """Tell whether a class of the suite reads what it keeps itself."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def test_no_other_file_uses_a_private_name_of_flowers(attributes: set[str]) -> None:
    found = [
        f"{file.relative_to(ROOT)}: {name}"
        for room in SHIPPED
        for file in sorted((ROOT / room).rglob("*.py"))
        if file != PRIVATE
        for name in private_names(ast.parse(file.read_text(encoding="utf-8")), attributes)
    ]
    assert not found, "\n".join(found)


def test_private_names_are_found(attributes: set[str]) -> None:
    found = set(private_names(ast.parse(PRIVATE.read_text(encoding="utf-8")), attributes))
    named = {"flwr.supercore.run.Run", "flwr.common.config.flatten_dict", "'_mods'", "'_data'", "._run_id"}
    assert named | {"'flwr.superlink.grid.inmemory_grid'"} <= found
    read = "import flwr.common.constant\nfrom flwr.serverapp.strategy.fedtrimmedavg import trim_mean\n"
    assert len(set(private_names(ast.parse(read), attributes))) == 2
