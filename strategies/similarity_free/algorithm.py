"""FedAvg, FedProx and their error-feedback forms under a step-size schedule.

Paper: A. Beikmohammadi, S. Khirirat, S. Magnússon, "On the Convergence of Federated Learning Algorithms
without Data Similarity", the server's lines of Algorithms 1 to 4.
Differs: the paper does not cover missing workers. Here a worker that is asked and has no valid reply counts
as one that did not move: the divisor stays n, and the virtual iterate exact. n are the workers online. Under
``weighting="examples"`` a worker with its own data weighs at most ``max_weight_ratio`` medians.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hedgerow.strategies.context import RoundContext
from hedgerow.strategies.exchange import Ask, Exchange, Steps, Vector
from hedgerow.strategies.method import Method
from hedgerow.strategies.schedules import Schedule
from hedgerow.wire.checks import in_range, int_at_least, one_of

DOWN, UP = "server->worker", "worker->server"


@dataclass(frozen=True)
class InnerSolver:
    """How a worker approximates its proximal point: gradient steps on the inner problem.

    Parameters
    ----------
    lr : str (default: "auto:0.1")
        ``auto:<max>``, a third of the proximal parameter and at most the maximum; or ``fixed:<value>``, which
        diverges if it exceeds twice the proximal parameter.
    steps : int (default: 30)
        Maximum number of inner steps, >= 1.
    tol : float (default: 1e-3)
        Stop at this residual relative to the first gradient, in [0, 1).
    batch : {"fixed", "fresh"} (default: "fixed")
        One mini-batch per round, as in the theory, or one per inner step.
    """

    lr: str = "auto:0.1"
    steps: int = 30
    tol: float = 1e-3
    batch: Literal["fixed", "fresh"] = "fixed"

    def __post_init__(self) -> None:
        int_at_least(1, steps=self.steps)
        in_range("tol", self.tol, 0.0, 1.0, open_above=True)
        one_of("batch", self.batch, ("fixed", "fresh"))

    def instructions(self) -> dict[str, str | int | float]:
        """Return the solver as keys of a message's config."""
        return {
            "inner-lr": self.lr,
            "inner-steps": self.steps,
            "inner-tol": self.tol,
            "inner-batch": self.batch,
        }


@dataclass(frozen=True, eq=False)
class State:
    """x^k, (M,)."""

    x: Vector


class Algorithm(Method[State]):
    """Algorithms 1 to 4, line by line; ``SimilarityFree`` adds the user's settings."""

    state_class = State
    schedule: Schedule
    operator: str
    schedule_drives: str
    local_iters: int
    batch_size: int
    inner: InnerSolver
    probe_rounds: int

    def begin(self, model: Vector) -> State:
        """Return x^0."""
        return State(model)

    def round(self, state: State, run: RoundContext) -> Steps[State]:
        """Send x^k and gamma^k, and move x^k by the mean of the workers' changes."""
        x, k = state.x, run.round - 1
        workers = range(self.federation.num_clients)
        train = Exchange("train", [Ask(workers, x)], self.instructions(k, run), (DOWN, UP))
        mean = (yield from self.means(train, run)).get(0)
        if mean is None:
            return state
        # (1/n) sum_i: a worker without a valid reply counts as unchanged, at x^k.
        missing = sorted(set(run.online) - set(mean.nodes))
        by_examples = self.mean.by_examples if self.sums is None else self.sums.weighted_by
        sizes = run.known_sizes(missing, otherwise=mean.weight / len(mean.nodes))
        stayed = sum(sizes) if by_examples else float(len(missing))
        return State(mean.model(stayed).astype(x.dtype))

    def model(self, state: State) -> Vector:
        """Return x^k."""
        return state.x

    def moved(self, state: State, model: Vector) -> State:
        """Replace x^k; the workers keep their error memories."""
        return State(model)

    def local_step(self, k: int) -> float:
        """Return the factor of a gradient in round k (from 0), or that round's proximal parameter."""
        gamma = self.schedule(k)
        return gamma / self.local_iters if self.schedule_drives == "round" else gamma

    def instructions(self, k: int, run: RoundContext) -> Mapping[str, Any]:
        """Return the workers' instructions for round k (from 0)."""
        config: dict[str, Any] = {
            "server-round": run.round,
            "round-index": k,
            "operator": self.operator,
            "local-step": self.local_step(k),
            "local-iters": self.local_iters,
            "batch-size": self.batch_size,
            "seed": run.seed,
            "probe": k < self.probe_rounds,
        }
        return config | self.inner.instructions() if self.operator == "prox" else config
