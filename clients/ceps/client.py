"""The client of CEPS and its baselines.

Paper: S. Sha, S. Zhou, L. Kong, G. Y. Li, "Sparse Decentralized Federated Learning", Algorithms 1 and 2 at
one node. ``step.py`` has the iteration, ``gossip.py`` the messages.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from flwr.app import ConfigRecord

from hedgerow.clients.app import BatchClientApp
from hedgerow.clients.ceps.baselines import BASELINES
from hedgerow.clients.ceps.neighbourhood import neighbour_mean, neighbourhood_of
from hedgerow.clients.ceps.step import Rules, State, advance, communicate, initial_state
from hedgerow.clients.gossip import GossipNode, GossipNodeMethod, Memory, ProblemFn, gossip_app
from hedgerow.clients.gossip.method import Metrics
from hedgerow.clients.gossip.place import Vector
from hedgerow.clients.instructions import choice, positive, whole
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
    - for the others, the keys of ``decentralised_client``.

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
    return gossip_app(problem, {"ceps": _CEPS(), **BASELINES}, more, mods)


def penalty(largest_eigenvalue: float, num_nodes: int, r: float, d: int) -> float:
    """Return the paper's sigma_i = lambda_max(A_i^T A_i) / (m (2 r + 0.1) d_i), Section V-B."""
    return largest_eigenvalue / (num_nodes * (2 * r + 0.1) * d)


class _CEPS(GossipNodeMethod):
    """Algorithm 1."""

    def begin(self, node: GossipNode) -> Memory:
        rules = self._rules(node, self._sigma(node))
        return _memory(initial_state(node.problem, rules, partial(node.noised, index=0)), rules.sigma)

    def prepare(self, node: GossipNode, memory: Memory, k: int) -> Memory:
        rules = self._rules(node, memory.counts["sigma"])
        return _memory(advance(_state(memory), k, rules), rules.sigma)

    def message(self, node: GossipNode, memory: Memory) -> Vector:
        return memory.arrays["w"]

    def update(
        self,
        node: GossipNode,
        memory: Memory,
        received: Mapping[int, Vector],
        mixing: Mapping[int, float] | None,
    ) -> tuple[Memory, Metrics]:
        state, own = _state(memory), node.place.own
        rules = self._rules(node, memory.counts["sigma"])
        noised = partial(node.noised, index=state.iteration)
        after = communicate(state, own, received, node.problem, rules, noised)
        metrics: Metrics = {}
        if node.privacy.mode != "sound":
            mean = neighbour_mean(own, state.w, received)
            metrics["disagreement"] = float(np.sum((state.w - mean) ** 2)) / rules.s
            change, norm = float(np.linalg.norm(after.w - state.w)), float(np.linalg.norm(state.w))
            metrics["change"] = change / norm if norm > 0 else float(change > 0)
        return _memory(after, rules.sigma), metrics

    def look(self, node: GossipNode, memory: Memory, k: int) -> tuple[Memory, Vector]:
        memory = self.prepare(node, memory, k)
        return memory, memory.arrays["w"]

    def _rules(self, node: GossipNode, sigma: float) -> Rules:
        config, place = node.config, node.place
        s, mu, neighbours = whole(config, "s", 1), positive(config, "mu"), len(place.neighbours)
        return Rules(
            s, mu, place.kappa, sigma, neighbours, _is_c_fixed(config), node.privacy, neighbourhood_of(config)
        )

    def _sigma(self, node: GossipNode) -> float:
        """Return sigma_i, or the fixed c. lambda_max is expensive: this is called once per run."""
        config, place, problem = node.config, node.place, node.problem
        if _is_c_fixed(config):
            return positive(config, "c")
        if node.privacy.mode == "sound":
            raise ValueError(
                "sigma-rule must be 'fixed_c' with privacy 'sound', got 'paper' in the message's config: "
                "the paper's rule reads the data and nothing accounts for it"
            )
        by_bits = "sigma-d" in config and choice(config, "sigma-d", ("samples", "bits")) == "bits"
        d = whole(config, "d", 1) if by_bits else problem.num_examples
        return penalty(problem.largest_eigenvalue, place.num_nodes, place.r, d)


def _is_c_fixed(config: ConfigRecord) -> bool:
    return choice(config, "sigma-rule", ("paper", "fixed_c")) == "fixed_c"


def _state(memory: Memory) -> State:
    known = {"participants": 0, "gradients": 0, "missed": 0, **memory.counts}
    counts = (int(known[key]) for key in ("participants", "gradients", "missed"))
    return State(memory.arrays["w"], memory.arrays["u"], memory.iteration, *counts)


def _memory(state: State, sigma: float) -> Memory:
    counts = {
        "participants": state.participants,
        "gradients": state.gradients,
        "missed": state.missed,
        "sigma": sigma,
    }
    return Memory({"w": state.w, "u": state.u}, state.iteration, counts)
