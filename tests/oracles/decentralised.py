"""Plain loops of the methods that CEPS is compared with: all nodes at once, dense mixing matrices.

``W`` is (m, m): row i has the weights of node i. ``gradients(X)`` takes and gives one row a node, (m, n).
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Gradients = Callable[[Array], Array]
# A message's code: (what is sent (m, n), number of the communication) -> what is received.
Code = Callable[[Array, int], Array]


def metropolis(edges: Sequence[tuple[int, int]], m: int) -> Array:
    degrees = [sum(i in edge for edge in edges) for i in range(m)]
    W = np.zeros((m, m))
    for i, j in edges:
        W[i, j] = W[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    return W + np.diag(1 - W.sum(axis=1))


def d_psgd(gradients: Gradients, X: Array, W: Sequence[Array], eta: float, kappa: int) -> Array:
    """Return X after the last of the communications, at kappa, 2 kappa, ..., one matrix each."""
    for a, matrix in enumerate(W):
        for _ in range(kappa if a == 0 else kappa - 1):
            X = X - eta * gradients(X)
        X = matrix @ X - eta * gradients(X)
    return X


def local_momentum(gradients: Gradients, X: Array, eta: float, theta: float, K: int) -> Array:
    y, before = X, X
    for _ in range(K):
        y, before = y - eta * gradients(y) + theta * (y - before), y
    return y


def local_ascent(gradients: Gradients, X: Array, eta: float, rho: float, K: int) -> Array:
    for _ in range(K):
        g = gradients(X)
        norms = np.linalg.norm(g, axis=1, keepdims=True)
        ascent = np.divide(rho * g, norms, out=np.zeros_like(g), where=norms > 0)
        X = X - eta * gradients(X + ascent)
    return X


def dfedavg(local: Callable[[Array], Array], X: Array, W: Sequence[Array]) -> Array:
    """Return X after a round for each matrix: local steps, then mixing."""
    for matrix in W:
        X = matrix @ local(X)
    return X


def dfedavg_quantised(local: Callable[[Array], Array], X: Array, W: Sequence[Array], code: Code) -> Array:
    for a, matrix in enumerate(W):
        X = X + matrix @ code(local(X) - X, a + 1)
    return X


def dcd_psgd(gradients: Gradients, X: Array, W: Array, eta: float, steps: int, code: Code) -> Array:
    """Return X; replicas need not be kept here, for they are X."""
    for a in range(steps):
        plus = W @ X - eta * gradients(X)
        X = X + code(plus - X, a + 1)
    return X


def dp_dsgt(
    gradients: Gradients, X: Array, W: Array, eta: float, steps: int, noised: Callable[[int, Array], Array]
) -> tuple[Array, Array, Array]:
    """Return the models, the trackers and the last gradients."""
    y, old = np.zeros_like(X), np.zeros_like(X)
    for a in range(steps):
        X = W @ (X - eta * y)
        new = noised(a, gradients(X))
        y, old = W @ y + new - old, new
    return X, y, old


def choco(local: Callable[[Array], Array], X: Array, W: Array, gamma: float, steps: int, code: Code) -> Array:
    """Return X; every copy of an estimate is the estimate, so that one matrix holds all."""
    estimate = np.zeros_like(X)
    for a in range(steps):
        half = local(X)
        estimate = estimate + code(half - estimate, a + 1)
        X = half + gamma * (W - np.eye(len(W))) @ estimate
    return X


def push_matrix(edges: Sequence[tuple[int, int]], m: int) -> Array:
    """Return P of directed edges (sender, receiver): a node deals to its receivers and itself alike."""
    P = np.zeros((m, m))
    for j in range(m):
        receivers = [j, *(b for a, b in edges if a == j)]
        P[receivers, j] = 1 / len(receivers)
    return P


def sgp(gradients: Gradients, X: Array, P: Sequence[Array], eta: float, K: int) -> tuple[Array, Array]:
    """Return the biased models and the weights (m, 1) after a communication for each matrix."""
    w = np.ones((len(X), 1))
    for matrix in P:
        for _ in range(K):
            X = X - eta * gradients(X / w)
        X, w = matrix @ X, matrix @ w
    return X, w


def beer(
    gradients: Gradients,
    X: Array,
    W: Array,
    eta: float,
    gamma: float,
    steps: int,
    code: Callable[[Array, Array, int], tuple[Array, Array]],
    noised: Callable[[int, Array], Array] = lambda index, g: g,
) -> tuple[Array, Array]:
    """Return the models and the trackers; ``code`` takes and gives both changes of a communication."""
    pull = gamma * (W - np.eye(len(W)))
    H, G = np.zeros_like(X), np.zeros_like(X)
    V = old = noised(0, gradients(X))
    for a in range(steps):
        X = X + pull @ H - eta * V
        new = noised(a + 1, gradients(X))
        V, old = V + pull @ G + new - old, new
        q_h, q_g = code(X - H, V - G, a + 1)
        H, G = H + q_h, G + q_g
    return X, V
