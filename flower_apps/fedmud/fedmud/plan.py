"""``hedgerow plan fedmud``: what a model's parameters become: factors, sent in full, or kept at home."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Column, Table

from fedmud.settings import METHODS, Settings, build_strategy, read


def plan(
    model: Annotated[str, typer.Option(help="A model's name, or module:function.")] = "cnn4",
    input_shape: Annotated[str, typer.Option(help="Shape of one sample.", metavar="N,N,...")] = "1,28,28",
    classes: Annotated[int, typer.Option(min=2, max=2**20, help="Number of classes.")] = 10,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "fedmud+bkd+aad",
    ratio: Annotated[float, typer.Option(help="Share of the trained numbers that is sent.")] = 0.03125,
    layers: Annotated[str, typer.Option(help="Patterns of the weights to compress.")] = "",
    budget: Annotated[str, typer.Option(help="What the ratio is of: model, or layer.")] = "model",
) -> Iterator[Table | str]:
    """List the parameters of a model: which become factors, the ranks, and what a node sends."""
    from hedgerow.tasks import build_model
    from hedgerow.wire.frozen import frozen_keys

    given: dict[str, str | float] = {
        "model": model,
        "method": method,
        "ratio": ratio,
        "layers": layers,
        "budget": budget,
    }
    values = read({**Settings.defaults(), **given})
    shape = tuple(int(part) for part in input_shape.split(","))
    net = build_model(model, shape, classes, 0)
    strategy = build_strategy(values, net)
    coded = {layer.key for layer in strategy.coded}
    factored = {layer.key: layer for layer in strategy.plan.layers}
    frozen = set(frozen_keys(net)) - coded
    table = Table(Column("parameter"), Column("shape"), Column("numbers", justify="right"), Column("sent"))
    sent = {"at home": 0, "in full": 0, "compressed": 0}
    for key, value in net.state_dict().items():
        kind = "compressed" if key in coded else "at home" if key in frozen else "in full"
        sent[kind] += value.numel()
        told = kind
        if (layer := factored.get(key)) is not None:
            size = f"rank {layer.rank}" if layer.rank else f"{layer.blocks} blocks of side {layer.side}"
            told = f"{layer.count:,} as factors, {size}"
        table.add_row(key, "x".join(map(str, value.shape)), f"{value.numel():,}", told)
    yield table
    parts = f"{sent['at home']:,} frozen, never sent; {sent['in full']:,} in full"
    yield f"{sum(sent.values()):,} numbers: {parts}; {sent['compressed']:,} compressed"
    yield (
        f"A reply: {strategy.uplink_bits / 32:,.0f} numbers of 32 bits, {strategy.uplink_bits / 8e6:.3f} MB, "
        f"{strategy.uplink_ratio:.4f} of what dense training sends"
    )
