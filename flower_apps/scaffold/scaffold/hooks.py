"""Hooks for Hedgerow's commands: the method's row in ``hedgerow check``."""

from collections.abc import Iterator

from hedgerow.sim import CheckedNodes, Hooks, Verdict


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Ask for one round."""
    from hedgerow.strategies import Scaffold

    outcome = nodes.run(Scaffold(max_repeats=0, **nodes.options))
    yield outcome.verdict("Scaffold", "app = scaffold_client()  # from hedgerow.clients")


HOOKS = Hooks(check=check)
