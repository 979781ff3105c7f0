"""Optimisers of the server on the mean change of a round: momentum, Adagrad, Adam and Yogi.

Papers: S. Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), Algorithm 2; T.-M. H. Hsu, H. Qi,
M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
(momentum).
Differs, as Flower's strategies do: v_{-1} is 0 instead of tau^2 or more, and Adam corrects its step for that.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hedgerow.strategies.parts.server_step import Memory, ServerStep
from hedgerow.wire.checks import in_range, made_of, positive

Change = NDArray[np.float64]


@dataclass(eq=False)
class ServerMomentum(ServerStep):
    """m_t = beta m_{t-1} + Delta_t,  x_{t+1} = x_t + lr m_t: Flower's FedAvgM.

    Parameters
    ----------
    lr : float (default: 1.0)
        The server's step size, > 0.
    beta : float (default: 0.9)
        In [0, 1).
    """

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        positive(lr=self.lr)
        in_range("beta", self.beta, 0.0, 1.0, open_above=True)
        super().__init__()

    def step(self, change: Change, memory: Memory) -> tuple[Change, Memory]:
        """Return lr m_t, and m_t."""
        m = change + self.beta * memory["m"] if memory else change
        return self.lr * m, {"m": m}


@dataclass(eq=False)
class _Adaptive(ServerStep):
    """m_t = beta1 m_{t-1} + (1 - beta1) Delta_t,  x_{t+1} = x_t + lr m_t / (sqrt(v_t) + tau)."""

    lr: float
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        positive(lr=self.lr, tau=self.tau)
        in_range("beta1", self.beta1, 0.0, 1.0, open_above=True)
        super().__init__()

    def step(self, change: Change, memory: Memory) -> tuple[Change, Memory]:
        """Return the change of the model, and m_t, v_t and t."""
        zero = np.zeros_like(change)
        t = memory.get("t", np.zeros(())) + 1
        m = self.beta1 * memory.get("m", zero) + (1 - self.beta1) * change
        v = self.second(change**2, memory.get("v", zero))
        return self.rate(float(t)) * m / (np.sqrt(v) + self.tau), {"m": m, "v": v, "t": t}

    @abstractmethod
    def second(self, square: Change, v: Change) -> Change:
        """Return v_t from Delta_t^2 and v_{t-1}."""

    def rate(self, t: float) -> float:
        """Return the step size of the t-th step, from 1."""
        return self.lr


@dataclass(eq=False)
class ServerAdagrad(_Adaptive):
    """v_t = v_{t-1} + Delta_t^2; the rest as in ``ServerYogi``. Flower's FedAdagrad.

    Parameters
    ----------
    lr : float
        The server's step size, > 0.
    beta1 : float (default: 0.0)
        In [0, 1).
    tau : float (default: 1e-3)
        > 0; the larger, the less the step adapts.
    """

    beta1: float = 0.0

    def second(self, square: Change, v: Change) -> Change:
        """Return v_t."""
        return v + square


@dataclass(eq=False)
class ServerYogi(_Adaptive):
    """v_t = v_{t-1} - (1 - beta2) Delta_t^2 sign(v_{t-1} - Delta_t^2): Flower's FedYogi.

    m_t = beta1 m_{t-1} + (1 - beta1) Delta_t and x_{t+1} = x_t + lr m_t / (sqrt(v_t) + tau).

    Parameters
    ----------
    lr : float
        The server's step size, > 0.
    beta1, beta2 : float (default: 0.9, 0.99)
        In [0, 1).
    tau : float (default: 1e-3)
        > 0; the larger, the less the step adapts.
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        in_range("beta2", self.beta2, 0.0, 1.0, open_above=True)
        super().__post_init__()

    def second(self, square: Change, v: Change) -> Change:
        """Return v_t."""
        return v - (1 - self.beta2) * square * np.sign(v - square)


@dataclass(eq=False)
class ServerAdam(ServerYogi):
    """v_t = beta2 v_{t-1} + (1 - beta2) Delta_t^2: Flower's FedAdam.

    The parameters are those of ``ServerYogi``. The step size of the t-th step, from 1, is
    lr sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1)).
    """

    def second(self, square: Change, v: Change) -> Change:
        """Return v_t."""
        return self.beta2 * v + (1 - self.beta2) * square

    def rate(self, t: float) -> float:
        """Return the corrected step size."""
        return float(self.lr * np.sqrt(1 - self.beta2 ** (t + 1)) / (1 - self.beta1 ** (t + 1)))


SERVER_STEPS: dict[str, type[ServerStep]] = {
    "adagrad": ServerAdagrad,
    "adam": ServerAdam,
    "momentum": ServerMomentum,
    "yogi": ServerYogi,
}
_VALID = "empty, or adagrad, adam, momentum or yogi with its values, such as 'adam(lr=0.01)'"


def parse_server_step(text: str) -> ServerStep | None:
    """Return the optimiser of a text such as ``adam(lr=0.01, beta1=0.9)``; None for an empty one.

    Raises
    ------
    ValueError
        If there is no such optimiser, or its values are not valid.
    """
    return made_of(text, SERVER_STEPS)


# The setting of every app whose method averages.
SERVER_STEP_TEXTS = {"server-step": (_VALID, parse_server_step)}
