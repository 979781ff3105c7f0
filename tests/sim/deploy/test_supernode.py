"""Node configs as the command line says them."""

import pytest

from hedgerow.sim.deploy.supernode import node_configs


def test_a_node_config_is_for_all_for_one_or_for_some() -> None:
    texts = ["site=north", '0: role=hub group="a b"', "1-2: role=leaf rank=3", "2:role=late"]
    assert node_configs(texts, 4) == [
        {"site": "north", "role": "hub", "group": "a b"},
        {"site": "north", "role": "leaf", "rank": 3},
        {"site": "north", "role": "late", "rank": 3},
        {"site": "north"},
    ]


@pytest.mark.parametrize("text", ["4: role=hub", "2-1: role=hub", "0-4: role=hub"])
def test_a_partition_that_is_not_there_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="partitions must be from 0 to 3"):
        node_configs([text], 4)


def test_a_node_config_may_hold_each_nodes_own_number() -> None:
    configs = node_configs(["1-2: data=/srv/{partition-id}.npz", "name=node-{partition-id}"], 3)
    assert [config.get("data") for config in configs] == [None, "/srv/1.npz", "/srv/2.npz"]
    assert [config["name"] for config in configs] == ["node-0", "node-1", "node-2"]
