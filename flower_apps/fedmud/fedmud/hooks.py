"""FedMUD's hooks: its planner, and its row in ``hedgerow check``."""

from __future__ import annotations

from collections.abc import Iterator

from fedmud.plan import plan
from hedgerow.sim import CheckedNodes, Hooks, Verdict


def check(nodes: CheckedNodes) -> Iterator[Verdict]:
    """Request one round of encoded layers, or of plain ones if the model has none to encode."""
    from hedgerow.strategies import FedMUD
    from hedgerow.wire.compress import compressed_part
    from hedgerow.wire.layers import LayerShape
    from hedgerow.wire.records import Layout

    name = "FedMUD and its family"
    layout = Layout.of(nodes.some_arrays)
    layers = [
        LayerShape(key, shape)
        for key, shape in zip(layout.keys, layout.shapes, strict=True)
        if len(shape) in (2, 4) and min(shape) > 0
    ]

    def made(variant: str) -> FedMUD:
        return FedMUD(
            variant=variant, layers=layers, num_parameters=compressed_part(layout).size, ratio=1.0,
            budget="layer", skip_front=0, skip_back=0, local_epochs=1, max_repeats=0,
            min_train_nodes=nodes.least, **nodes.options,
        )  # fmt: skip

    try:
        # Without such a layer nothing is encoded, and the messages are the same.
        strategy = made("mud+bkd+aad" if layers else "dense")
    except ValueError:  # Factors of layers as small as these are larger than the layers.
        layers = []
        strategy = made("dense")
    outcome = nodes.run(strategy)
    mend = "app = fedmud_client()  # from hedgerow.clients; dataset and model in the run config are your own"
    if outcome.served and not layers:
        lacks = "the model has no Linear or Conv2d layer to encode: only variant='dense'"
        yield Verdict(name, "partly", lacks)
    else:
        yield outcome.verdict(name, mend)


HOOKS = Hooks(plan=plan, check=check)
