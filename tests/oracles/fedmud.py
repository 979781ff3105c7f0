"""FedMUD, S. Li et al., "The Panaceas for Improving Low-Rank Decomposition in Communication-Efficient
Federated Learning", eqs. (3) to (9), as one plain loop in float64 over a linear regression y = W x + b, of
which W is compressed and b is not.

It is the documentation and the oracle of the fast paths, and knows nothing of them. Nodes take full-batch
gradient steps, so that the order of samples plays no role.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Factors = dict[str, Array]

# What is drawn from U(-a, a) at a reset, and what starts at zero. A tilde: drawn, and never trained.
RANDOM = {"mud": ("U",), "mud+f": ("U~",), "mud+aad": ("U~", "V~"), "lora": ("V",), "lora+f": ("V~",)}
TRAINED = {"mud": ("U", "V"), "mud+f": ("V",), "mud+aad": ("U", "V"), "lora": ("U", "V"), "lora+f": ("U",)}
# Delta is the sum of the products of these, eq. (8) for AAD.
TERMS = {"mud": (("U", "V"),), "mud+f": (("U~", "V"),), "mud+aad": (("U", "V~"), ("U~", "V"))}
TERMS |= {"lora": (("U", "V"),), "lora+f": (("U", "V~"),)}


class Form(NamedTuple):
    """How the m x n matrix is factored: rank r, or b Kronecker blocks of z x z factors."""

    variant: str  # "mud", "mud+f", "mud+aad", "lora" or "lora+f"
    m: int
    n: int
    rank: int = 0
    blocks: int = 0
    side: int = 0

    def shape(self, name: str) -> tuple[int, ...]:
        if self.side:
            return self.blocks, self.side, self.side
        return (self.m, self.rank) if name[0] == "U" else (self.rank, self.n)

    def delta(self, F: Factors) -> Array:
        return sum((self.product(F[u], F[v]) for u, v in TERMS[self.variant]), np.zeros((self.m, self.n)))

    def product(self, U: Array, V: Array) -> Array:
        """Return U V, or the first m n entries of the blocks U_j (x) V_j, one after the other."""
        if not self.side:
            return np.asarray(U @ V)
        flat = np.concatenate([np.kron(u, v).ravel() for u, v in zip(U, V, strict=True)])
        return flat[: self.m * self.n].reshape(self.m, self.n)

    def gradients(self, F: Factors, G: Array) -> Factors:
        """Return the gradients of the trained factors from that of Delta, eq. (20)."""
        grads = {name: np.zeros(self.shape(name)) for name in TRAINED[self.variant]}
        for u, v in TERMS[self.variant]:
            to_u, to_v = self.product_gradients(F[u], F[v], G)
            for name, gradient in ((u, to_u), (v, to_v)):
                if name in grads:
                    grads[name] += gradient
        return grads

    def product_gradients(self, U: Array, V: Array, G: Array) -> tuple[Array, Array]:
        if not self.side:
            return G @ V.T, U.T @ G
        b, z = self.blocks, self.side
        padded = np.zeros(b * z**4)
        padded[: G.size] = G.ravel()
        blocks = padded.reshape(b, z, z, z, z)  # (j, i, p, d, c), entry (i z + p, d z + c) of block j
        return np.einsum("jpc,jipdc->jid", V, blocks), np.einsum("jid,jipdc->jpc", U, blocks)


def draw(shape: Sequence[int], a: float, seed: int, reset: int, role: int) -> Array:
    """Return U(-a, a), float32 values, as both sides draw them: layer 0, role 0 for U and 1 for V."""
    sequence = np.random.SeedSequence([seed, reset, 0, role])
    uniform = np.random.Generator(np.random.Philox(sequence)).random(tuple(shape))
    return ((2 * uniform - 1) * a).astype(np.float32).astype(np.float64)


def at_reset(form: Form, a: float, seed: int, reset: int) -> Factors:
    """Return all factors right after a reset."""
    F = {name: np.zeros(form.shape(name)) for name in TRAINED[form.variant]}
    drawn = {
        name: draw(form.shape(name), a, seed, reset, int(name[0] == "V")) for name in RANDOM[form.variant]
    }
    return F | drawn


def local_training(
    form: Form, W: Array, F: Factors, b: Array, x: Array, y: Array, eta: float, steps: int
) -> tuple[Factors, Array]:
    """Return factors and bias after gradient steps on mean ||(W + Delta) x + b - y||^2 / 2."""
    for _ in range(steps):
        residual = x @ (W + form.delta(F)).T + b - y  # (samples, m)
        G = residual.T @ x / len(x)
        grads = form.gradients(F, G)
        F = F | {name: F[name] - eta * gradient for name, gradient in grads.items()}
        b = b - eta * residual.mean(0)
    return F, b


class Round(NamedTuple):
    """After a round: the effective model, the base, and how often it was merged into."""

    effective: Array  # W + Delta, or W right after a merge
    b: Array
    W: Array
    version: int


def run(
    form: Form,
    data: Sequence[tuple[Array, Array]],
    W: Array,
    b: Array,
    participants: Callable[[int], Sequence[int]],
    *,
    rounds: int,
    reset_interval: int,
    eta: float,
    steps: int,
    a: float,
    seed: int,
    residual: bool = False,
) -> list[Round]:
    """Run all rounds; nodes weigh as much as they have samples.

    With ``residual``, what the product of mean factors misses of the mean product is added to W each round
    (FedEx-LoRA), which counts as a version.
    """
    version, F = 0, at_reset(form, a, seed, 0)
    history = []
    for t in range(1, rounds + 1):
        chosen = participants(t)
        trained = [local_training(form, W, F, b, *data[i], eta, steps) for i in chosen]
        p = np.array([len(data[i][0]) for i in chosen], np.float64)
        p /= p.sum()
        products = sum(
            (p_i * form.delta(F_i) for p_i, (F_i, _) in zip(p, trained, strict=True)), np.zeros_like(W)
        )
        F = {
            name: sum(p_i * F_i[name] for p_i, (F_i, _) in zip(p, trained, strict=True)) for name in F
        }  # (4)
        b = sum((p_i * b_i for p_i, (_, b_i) in zip(p, trained, strict=True)), np.zeros_like(b))
        if residual:
            W, version = W + products - form.delta(F), version + 1
        if t % reset_interval == 0:
            W, version = W + form.delta(F), version + 1  # (5)
            F = at_reset(form, a, seed, version)
        history.append(Round(W + form.delta(F), b, W, version))
    return history
