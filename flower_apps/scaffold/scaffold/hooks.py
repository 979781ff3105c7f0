"""Hooks for Hedgerow's commands: the method's row in ``hedgerow check``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hedgerow.sim import CheckedNodes, Hooks, Verdict

if TYPE_CHECKING:
    from hedgerow.strategies import Scaffold

_FEW, _MORE = 1, 4
_MEND = "app = scaffold_client()  # from hedgerow.clients"


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Ask for few steps and then more: nodes must follow, and reply a new control variate."""
    honours, few, more = nodes.honours(partial(_strategy, nodes), _FEW, _MORE)
    if few.served and more.served and honours is False:
        why = f"nodes train the same model for {_FEW} and {_MORE} local-steps"
        yield Verdict("Scaffold", "no", why, _MEND)
    else:
        yield (few if more.served else more).verdict("Scaffold", _MEND)


def _strategy(nodes: CheckedNodes, steps: int) -> Scaffold:
    from hedgerow.strategies import Scaffold

    return Scaffold(local_steps=steps, max_repeats=0, **nodes.options)


HOOKS = Hooks(check=check)
