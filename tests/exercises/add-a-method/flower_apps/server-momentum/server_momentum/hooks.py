"""Hooks for Hedgerow's commands: the method's row in ``hedgerow check``."""

from collections.abc import Iterator

from hedgerow.sim import CheckedNodes, Hooks, Verdict

__all__ = ["HOOKS"]


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Ask for one round."""
    from hedgerow.strategies.server_momentum import ServerMomentum

    options = {key: nodes.options[key] for key in ("min_available_nodes",)}
    outcome = nodes.run(ServerMomentum(max_repeats=0, **options))
    yield outcome.verdict("ServerMomentum", "app = server_momentum_client()  # from hedgerow.clients")


HOOKS = Hooks(check=check)
