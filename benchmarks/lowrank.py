"""Milliseconds of a low-rank update: one product for all layers, a loop over layers and blocks, and a merge.

    python benchmarks/lowrank.py [--model cnn10] [--threads 1] [--repeats 5] [--ratio 0.03125]

``deltas`` is forward and backward as local training runs them, ``loop`` the same with ``torch.kron`` block by
block, ``merge`` what a node pays for each reset that it replays. The best of all repeats; the ratios are to
``deltas``.
"""

import argparse
import time
from collections.abc import Callable, Mapping

import torch
from reports import report
from torch import Tensor

from hedgerow.tasks import build_model, count_parameters
from hedgerow.wire.layers import layers_of
from hedgerow.wire.lowrank import VARIANTS, FactoredLayer, Factorisation

KRONECKER = ("mud+bkd", "mud+bkd+f", "mud+bkd+aad")


def block_by_block(layer: FactoredLayer, factors: Mapping[str, Tensor]) -> Tensor:
    """Return a flat layer's update as the definition reads."""
    pairs = {"mud+bkd": ["UV"], "mud+bkd+f": ["~V"], "mud+bkd+aad": ["U~", "~V"]}[layer.variant]
    total = torch.zeros(layer.size)
    for left, right in pairs:
        u = factors[f"{layer.key}:{left.replace('~', 'U~')}"]
        v = factors[f"{layer.key}:{right.replace('~', 'V~')}"]
        blocks = [torch.kron(u[j], v[j]).flatten() for j in range(layer.blocks)]
        total = total + torch.cat(blocks)[: layer.size]
    return total.reshape(layer.shape)


def best_ms(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1000 * min(seconds)


def train_step(update: Callable[[], Mapping[str, Tensor]]) -> None:
    torch.stack([delta.sum() for delta in update().values()]).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="cnn10")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=1 / 32)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = build_model(options.model, (3, 32, 32), 10, seed=0)
    base = {key: value.detach() for key, value in model.state_dict().items()}

    print(f"{'variant':<12} {'deltas ms':>10} {'loop':>7} {'merge':>7}   factors / weights")
    for variant in VARIANTS[:-1]:
        plan = Factorisation.plan(
            layers_of(model), variant=variant, num_parameters=count_parameters(model), ratio=options.ratio
        )
        together, looped, merge = measured(plan, base, options.repeats)
        loop = f"{looped / together:.1f}x" if looped else "-"
        print(
            f"{variant:<12} {together:>10.1f} {loop:>7} {merge / together:>6.1f}x   "
            f"{plan.count} / {plan.dense_count}"
        )
        of = "block by block" if looped else ""
        report(
            f"{options.model}, {variant}: updates and gradients", together, "ms",
            looped / together if looped else None, of,
        )  # fmt: skip


def measured(
    plan: Factorisation, base: Mapping[str, Tensor], repeats: int
) -> tuple[float, float | None, float]:
    generator, frozen = torch.Generator().manual_seed(0), plan.frozen(0, 0)
    factors = {
        key: torch.randn(shape, generator=generator).requires_grad_() for key, shape in plan.shapes.items()
    }
    every = {**frozen, **factors}
    together = best_ms(lambda: train_step(lambda: plan.deltas(factors, frozen)), repeats)
    looped = None
    if plan.variant in KRONECKER:
        looped = best_ms(
            lambda: train_step(lambda: {layer.key: block_by_block(layer, every) for layer in plan.layers}),
            repeats,
        )
    return together, looped, best_ms(lambda: plan.merge(base, factors, frozen), repeats)


if __name__ == "__main__":
    main()
