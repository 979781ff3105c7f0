"""HSGD's hooks: its planner, its row in ``hedgerow check``, and the keys of its node configs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hedgerow.sim import CheckedNodes, Hooks, Verdict
from hsgd.plan import plan


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Run one round, with the smallest model if the app's has no head, hospital and device."""
    from hedgerow.strategies import HSGD

    blocks = ("head.", "hospital.", "device.")
    split = all(any(key.startswith(block) for key in nodes.arrays) for block in blocks)
    arrays = nodes.arrays if split else nodes.zeros(*(f"{block}0" for block in blocks))
    options = {key: value for key, value in nodes.options.items() if key != "min_available_nodes"}
    strategy = HSGD(max_repeats=0, min_available_nodes=nodes.plan.num_nodes, **options)
    yield nodes.run(strategy, arrays).verdict("HSGD", "app = hsgd_client(load)  # from hedgerow.clients")


def node_keys() -> Sequence[str]:
    """Return the keys of a node config about own data."""
    from hedgerow.clients.hsgd.own_data import OWN_KEYS

    return OWN_KEYS


HOOKS = Hooks(plan=plan, check=check, node_keys=node_keys)
