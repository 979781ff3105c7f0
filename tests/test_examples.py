"""The examples run as they stand, and do what they say."""

import runpy
from pathlib import Path

import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def output(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the two lines that an example prints; Flower's log may stand around them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        example = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    # What a pyproject.toml names as components.
    assert isinstance(example["server_app"], ServerApp)
    assert isinstance(example["client_app"], ClientApp)
    return capsys.readouterr().out.splitlines()[-2:]


def numbers(line: str) -> list[float]:
    """Return the numbers of a line."""
    return [float(word) for word in line.split() if word.replace(".", "", 1).isdigit()]


def test_sd_feel_runs_over_an_app_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, time = output("sd_feel_any_app", capsys)
    assert numbers(accuracy)[0] > 0.9
    assert time.startswith("40 iterations")


def test_compressed_runs_over_an_app_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    accuracy, uplinks = output("compressed_any_app", capsys)
    assert numbers(accuracy)[0] > 0.9
    sent, dense = numbers(uplinks)
    assert sent < dense / 4


def test_similarity_free_learns_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    loss, uplinks = output("similarity_free_own_model", capsys)
    first, last = numbers(loss)
    assert last < 0.5 * first
    # An index and a value for each of the 19 largest of 195 entries, from six nodes in 30 rounds.
    assert numbers(uplinks)[0] <= 6 * 30 * 19 * 64


def test_fedmud_learns_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    loss, uplinks = output("fedmud_own_model", capsys)
    first, last = numbers(loss)
    assert last < 0.75 * first
    sent, dense = numbers(uplinks)
    assert sent < dense / 2


def test_ceps_learns_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    loss, messages = output("ceps_own_model", capsys)
    first, last = numbers(loss)
    assert last < 0.05 * first
    # A norm and a sign for each projection.
    assert numbers(messages)[1] == 64 + 120


def test_hsgd_learns_a_model_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    loss, iterations = output("hsgd_own_model", capsys)
    first, last = numbers(loss)
    assert last < 0.5 * first
    assert numbers(iterations)[0] == 100


def test_nodes_agree_on_their_mean_over_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    spread, messages = output("router_any_app", capsys)
    first, last, mean = numbers(spread)
    assert last < 0.001 * first
    assert mean == sum(i**2 for i in range(8)) / 8
    assert numbers(messages) == [40 * 8 * 2, 64]
