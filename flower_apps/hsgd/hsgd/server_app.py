"""The app's server: settings, strategy, run folder, and a table at the end."""

from collections.abc import Sequence

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from hedgerow.sim.runs.serverapp import run_strategy
from hedgerow.strategies import HSGD
from hedgerow.strategies.rounds import RoundCallback
from hedgerow.wire.records import to_record, to_state_dict
from hsgd import settings
from hsgd.client_app import app as client_app
from hsgd.evaluation import SplitMetrics
from hsgd.parties import deal

app = ServerApp()

REALISM = (
    "Hospitals and devices train for real on their own half, and encodings, heads and models travel in "
    "messages through Flower's hub. An edge that is one node hosts its devices, whose links are then booked "
    "as if they were used. Seconds are modelled, from the paper's rates"
)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the settings of the run config and write a run folder."""
    values = settings.read(context.run_config)
    parties = deal(values)
    settings.check_size(values, parties)
    metrics = SplitMetrics(parties, values["train-loss-samples"])
    built: list[HSGD] = []

    def build(callbacks: Sequence[RoundCallback]) -> HSGD:
        built.append(settings.build_strategy(values, on_round_end=callbacks))
        return built[0]

    def measure(state: dict[str, Tensor]) -> dict[str, float]:
        """Return the global model's metrics; of groups that stay apart, the mean over theirs."""
        (strategy,) = built
        if strategy.aggregate:
            return metrics(state)
        return metrics.mean([to_state_dict(model) for model in strategy.models()])

    run_strategy(
        grid,
        context,
        name="hsgd",
        realism=REALISM,
        title=f"{values['method']} on {values['dataset']}, {values['num-groups']} groups",
        values=values,
        build=build,
        client_app=client_app,
        initial_arrays=to_record({key: value.clone() for key, value in parties.model.state_dict().items()}),
        num_rounds=settings.num_rounds(values),
        train_config={},
        measure=measure,
    )
