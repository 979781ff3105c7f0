"""HSGD's Algorithm 1; ``means.py`` has its two means, (1) of a group's devices and (2) of groups.

Paper: C. Yu, S. Shen, S. Wang, K. Zhang, H. Zhao, "Communication-Efficient Hybrid Federated Learning for
E-health with Horizontal and Vertical Data Partitioning", Algorithm 1 with (1), (2) and (5) to (7). C-HSGD,
JFL, TDCD and C-TDCD are groupings and compressions of the same rounds.
Differs: devices are averaged before groups, over the set that just trained: (2) needs (1) of that iteration,
which the printed order has not computed yet. Parties can fail. A device without a reply to the exchange is
not in the batch; one without a reply to the update is not in the average, and if all fail, theta_2 stays. If
the hospital, the edge node, or in the exchange all devices of a group fail, the group skips the interval and
keeps its three blocks. If it skips the interval before a global aggregation, it is not in (2): the server has
no head and hospital's encoder that were not uploaded.

Notation: group m has the model theta_m = (theta_0, theta_1, theta_2), its head, hospital's encoder and
devices' encoder, and K_m people; A_m are those in a local interval. A round is a global interval of P
iterations, in P / Q local intervals, each with an exchange and an update at both sides.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import RoundFailedError, Steps, Vector
from hedgerow.strategies.hsgd.exchange import (
    Group,
    Interval,
    Local,
    Theta,
    ThetaBlocks,
    batch_size,
    draw,
    exchanged,
    stepped,
)
from hedgerow.strategies.hsgd.means import Means, mean_of_models
from hedgerow.strategies.hsgd.theory import Pace
from hedgerow.strategies.method import Method


@dataclass(frozen=True, eq=False)
class State:
    """The cloud's state after a round."""

    theta: Theta  # The global model, (2); without aggregation, the mean of the groups' models.
    t: int = 0  # Iterations so far.
    # Without aggregation: K_m and theta_m of each group that has trained.
    apart: Mapping[int, tuple[int, Theta]] = field(default_factory=dict)
    first: Theta | None = None  # The start of groups that have not; None with a global model.

    def start(self, m: int) -> Theta:
        """Return the model from which group m starts a round."""
        if self.first is None:
            return self.theta
        return self.apart[m][1] if m in self.apart else self.first


class Algorithm(Method[State]):
    """Algorithm 1, line by line; ``HSGD`` adds the settings."""

    state_class = State
    groups: Sequence[Group]
    averages: Means
    participation: float
    aggregate: bool
    pairs: bool  # JFL: whether every sampled pair has its own model in a round.

    @property
    @abstractmethod
    def pace(self) -> Pace:
        """P, Q and eta in use."""

    @property
    def iterations(self) -> int:
        """t, local iterations so far."""
        return 0 if self.state is None else self.state.t

    @abstractmethod
    def interval(
        self, t: int, run: RoundContext, *, starts: bool, uploads: bool, plain: bool = False
    ) -> Interval:
        """Return the local interval that starts at t.

        - ``starts``, ``uploads``: Whether it is the first, and the last, of its round.
        - ``plain``: For estimates: the steps alone, outside the round's training.
        """

    @abstractmethod
    def advance(self, P: int, Q: int) -> None:
        """Advance the clock by a global interval of the slowest group."""

    def begin(self, model: Vector) -> State:
        """Return theta^0."""
        theta = ThetaBlocks(self.federation.known_layout()).split(model)
        return State(theta, first=None if self.aggregate else theta)

    def unstepped(self) -> str | None:
        """Return why no server step can act on (1) and (2)."""
        return "its two means are of parts of a model, by devices and by groups"

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Make P iterations in P / Q local intervals, then average the groups."""
        P, Q = self.pace.P, self.pace.Q
        groups = [Local(group, state.start(group.number)) for group in self.groups]
        for t in range(state.t, state.t + P, Q):
            starts, uploads = t == state.t, t + Q == state.t + P
            groups = [self.drawn(local, t, starts) for local in groups]  # line 13
            interval = self.interval(t, run, starts=starts, uploads=uploads)
            groups = yield from local_interval(interval, groups, self.averages, run)
        if missed := sum(local.missed for local in groups):
            run.metrics["missed-intervals"] = missed
        return (yield from self.global_aggregation(state, groups, run))

    def drawn(self, local: Local, t: int, starts: bool) -> Local:
        """Draw A_m; in JFL it stays for the round, without people whose party failed."""
        if self.pairs and not starts:
            return local
        count = batch_size(self.participation, local.group.size)
        ids = draw(local.group, count, seed=self.settings.seed, t=t)
        return replace(local, ids=tuple(ids), device_models=local.device_models if self.pairs else {})

    def global_aggregation(self, state: State, groups: Sequence[Local], run: RoundContext) -> Steps[State]:
        """Average the remaining groups, weighted by their people, (2)."""
        theta, left = yield from self.averages.of_groups(state.theta, groups, run)
        if left < max(1, min(self.settings.min_train_nodes, len(self.groups))):
            raise RoundFailedError
        run.metrics["groups"] = left
        t = state.t + self.pace.P
        if state.first is None:
            return State(theta, t)
        # Without a cloud, each group continues from its own model, absent ones from their last.
        now = {local.group.number: (local.group.size, local.model or local.start) for local in groups}
        apart = dict(sorted({**state.apart, **now}.items()))
        return State((yield from mean_of_models(state.theta, apart, run)), t, apart, state.first)

    def model(self, state: State) -> Vector:
        """Return theta."""
        return ThetaBlocks(self.federation.known_layout()).join(state.theta)


def local_interval(
    interval: Interval, groups: Iterable[Local], averages: Means, run: RoundContext
) -> Steps[list[Local]]:
    """Exchange encodings, make Q steps on both sides, and average the devices of each group."""
    swaps = yield from exchanged(interval, groups, run)  # Lines 14 to 18: head and zeta_1, zeta_2.
    groups = yield from stepped(interval, swaps, run)  # (5), (6) at hospitals and (7) at devices.
    return (yield from averages.of_devices(interval, groups, run))  # (1)
