"""The factors with the update nearest to a given one, such as the result of a robust rule.

If one factor of each product is frozen, an update is linear in the trained factors: this is a least-squares
problem, solved by products with the map and its transpose only.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hedgerow.wire.extras import needed
from hedgerow.wire.lowrank import Factorisation

# LSQR's relative tolerance, and its maximum number of iterations.
_TOLERANCE, _ITERATIONS = 1e-7, 200


def nearest_factors(
    plan: Factorisation, frozen: Mapping[str, Tensor], update: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the factors (C,) with the update nearest to the given one (D,), of least norm.

    Each product of the plan must have a frozen factor; ``frozen`` is ``plan.frozen`` of the current reset.
    Vectors hold the layers one after the other.
    """
    if not plan.layers:
        return np.zeros(0)
    fixed = {key: value.double() for key, value in frozen.items()}
    sizes = [int(np.prod(shape)) for shape in plan.shapes.values()]

    def given(factors: Tensor) -> Tensor:
        parts = zip(plan.shapes.items(), torch.split(factors, sizes), strict=True)
        updates = plan.deltas({key: part.reshape(shape) for (key, shape), part in parts}, fixed)
        return torch.cat([updates[layer.key].flatten() for layer in plan.layers])

    start = torch.zeros(plan.count, dtype=torch.float64, requires_grad=True)
    traced = given(start)

    def product(factors: NDArray[np.float64]) -> NDArray[np.float64]:
        with torch.no_grad():
            return given(torch.from_numpy(np.ascontiguousarray(factors.ravel()))).numpy()

    def transposed(updates: NDArray[np.float64]) -> NDArray[np.float64]:
        weights = torch.from_numpy(np.ascontiguousarray(updates.ravel()))
        return torch.autograd.grad(traced, start, weights, retain_graph=True)[0].numpy()

    linalg = needed("scipy.sparse.linalg", "math")
    shape = (plan.dense_count, plan.count)
    linear = linalg.LinearOperator(shape, matvec=product, rmatvec=transposed, dtype=np.float64)
    found = linalg.lsqr(linear, update, atol=_TOLERANCE, btol=_TOLERANCE, iter_lim=_ITERATIONS)
    return np.asarray(found[0], np.float64)
