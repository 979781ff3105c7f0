"""What nodes spent is a mean of all nodes, whoever is in an event, and outlives a checkpoint."""

from flwr.app import MetricRecord

from hedgerow.strategies.gossip.work import Work


def test_who_is_not_in_an_event_counts_with_what_it_said_last() -> None:
    work = Work(4)
    for i in range(4):
        work.tell(i, MetricRecord({"gradients": 2}))
    work.tell(1, MetricRecord({"gradients": 6}))
    assert work.metrics() == {"gradients": 3.0, "communications": 1.25}


def test_a_node_that_says_nothing_valid_adds_no_gradients() -> None:
    work = Work(2)
    work.tell(0, MetricRecord({}))
    work.tell(1, MetricRecord({"gradients": float("nan")}))
    work.tell(1, MetricRecord({"gradients": -3}))
    assert work.metrics() == {"gradients": 0.0, "communications": 1.5}
