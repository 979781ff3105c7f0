"""A strategy that is given too little, or something of another kind, says in one sentence what it needs."""

import inspect
import re

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowersFedAvg
from flwr.serverapp.strategy import Strategy

import hedgerow.strategies as public
from hedgerow.sim import simulate
from hedgerow.strategies import Compressed, Diminishing, FedMUD, SDFeel, SimilarityFree
from hedgerow.wire import TopK

STRATEGIES = sorted(
    name
    for name in public.__all__
    if inspect.isclass(made := getattr(public, name)) and issubclass(made, Strategy)
)


def refusal(name: str, **arguments: object) -> str:
    """Return why a strategy is not made, empty if it is."""
    try:
        getattr(public, name)(**arguments)
    except (TypeError, ValueError, AttributeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_without_arguments_is_made_or_names_what_it_needs(name: str) -> None:
    if not (told := refusal(name)):
        return
    if said := re.fullmatch(rf"{name}\(\) must be given ([\w ]+), got none", told):
        # What it says is enough to get past this error.
        assert "must be given" not in refusal(name, **dict.fromkeys(said[1].split(" and ")))
    else:
        assert re.match(r"\w+ must be ", told), told


@pytest.mark.parametrize("wrong", [lambda replies: None, 0.1, None, object(), ["mean"]])
def test_an_aggregation_of_another_kind_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"aggregation must be a rule such as 'median', or an object"):
        SDFeel(aggregation=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"aggregation must be a rule such as 'median', or an object"):
        SimilarityFree(schedule=Diminishing(0.1, 0.6), aggregation=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"aggregation must be a rule such as 'median', or an object"):
        FedMUD(layers=[], num_parameters=1, aggregation=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0.1, "0.1", lambda k: 0.1, None])
def test_a_schedule_of_another_kind_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"schedule must be a Schedule of hedgerow.strategies, such as"):
        SimilarityFree.named("ef-fedavg", schedule=wrong)


def test_an_algorithm_is_asked_for() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of fedavg, fedprox, ef-fedavg, ef-fedprox"):
        SimilarityFree.named(schedule=0.1)


def test_an_object_as_compressor_is_that_of_its_text_or_refused() -> None:
    wrapped = Compressed(FlowersFedAvg(), TopK(0.1))
    assert str(wrapped.uplink.feedback.compressor) == str(TopK(0.1))
    with pytest.raises(ValueError, match=r"compressor must be a text such as .*, from which nodes make it"):
        Compressed(FlowersFedAvg(), object())  # type: ignore[arg-type]


def test_nodes_that_cannot_mask_are_told_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict(
            {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    arrays = ArrayRecord([np.zeros(3, np.float32)])
    with pytest.raises(RuntimeError), caplog.at_level("WARNING", logger="flwr"):
        simulate(
            lambda: SDFeel(num_servers=1, topology="complete", secure_sum=True, max_repeats=0, num_clients=3),
            app, 3, initial_arrays=arrays, num_rounds=2, quiet=True,
        )  # fmt: skip
    told = [record.message for record in caplog.records if "sd_feel_client()" in record.message]
    assert len(told) == 1
    assert told[0].startswith(
        "Left out of sums: nodes that report no num-examples. secure_sum needs a ClientApp"
    )
