"""The ClientApp of CEPS (``algorithm.py``) and its baselines (``baselines.py``)."""

from collections.abc import Mapping, Sequence

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.ceps.algorithm import Algorithm1
from hedgerow.clients.ceps.baselines import BASELINES
from hedgerow.clients.gossip import ProblemFn, gossip_app
from hedgerow.clients.mods.update import Mod
from hedgerow.wire.calls import BatchHandler


def ceps_client(
    problem: ProblemFn, more: Mapping[str, BatchHandler] | None = None, mods: Sequence[Mod] = ()
) -> BatchClientApp:
    """Return the ClientApp of CEPS and its baselines.

    It answers ``query.whoami``, ``query.hello``, ``query.publish``, ``train.update`` and, unless the
    node's own config has ``monitor`` = false, ``query.monitor``. The config of ``query.hello`` holds

    - ``method``: ``ceps`` or one of ``BASELINES``; ``run-seed``; ``num-nodes``; ``neighbours``, a list;
    - ``codec`` and its settings: ``s``, ``d``, ``gamma``, ``expand``, ``compand``, ``decoder``,
      ``phi-density``; ``phi-owner`` (absent: ``sender``);
    - ``kappa-low`` and ``kappa-high``, the bounds of the kappa that the node draws; ``r`` in (0, 1];
    - ``privacy`` and the keys of ``gradient_noise.privacy_of`` and ``noise_root``;
    - for ``ceps``: ``s``, ``mu``, ``sigma-rule``: ``paper`` with ``sigma-d``, ``samples`` (absent) or
      ``bits`` (then ``d``), or ``fixed_c`` with ``c``, the only one in the mode ``sound``; ``aggregation``
      (absent: ``mean``) and its ``aggregation-number``, read by ``neighbourhood_of``;
    - for the others, ``local-steps``, which is kappa unless ``kappa-low`` and ``kappa-high``, equal, are
      given; ``weights`` (absent: equal weights of the node and those it drew): this node's row of the mixing
      matrix, a number for each of ``neighbours`` and the node's own at the end; required by ``sgp``, where
      ``neighbours`` are the senders. The config of ``train.update`` may replace both, for a communication on
      another graph, or one in which not all receivers get the node's payload; ``eta`` > 0; ``theta`` in
      [0, 1) for ``dfedavgm``; ``rho-sam`` >= 0 for ``dfedsam``; ``threshold`` (absent: false) with ``s`` for
      ``d-psgd``, which then keeps s entries of each mixed model; ``step-gamma`` in (0, 1] for ``choco-sgd``
      and ``beer``.

    A second ``query.hello`` of the same run and config changes nothing, and returns the node's iteration.
    The state is in ``context.state``. A node that lost it refuses all messages but ``query.hello``, which
    restarts it at iteration 0; the next message then advances it to the message's iteration.

    Parameters
    ----------
    problem : Callable[[Context], Problem]
        Finds a node's objective. It is called for each message: cache what is expensive.
    more : Mapping[str, BatchHandler] or None (default: None)
        Other handlers by message type; they take precedence over those above.
    mods : Sequence[Mod] (default: none)
        As in ``gossip_app``.
    """
    return gossip_app(problem, {"ceps": Algorithm1(), **BASELINES}, more, mods)
