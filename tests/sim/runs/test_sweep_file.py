"""A sweep file says which runs there are, and everything that is wrong with it at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hedgerow.sim import read_sweep

WriteToml = Callable[[str], Path]


def test_variants_times_grid_in_the_files_order(write_toml: WriteToml) -> None:
    sweep = read_sweep(
        write_toml("""
            [grid]
            tau1 = [1, 5]
            topology = ["ring"]
            [[variant]]
            label = "SD-FEEL"
            method = "sd-feel"
            [[variant]]
            label = "HierFAVG / exact"
            method = "hierfavg"
        """)
    )
    assert [(variant.label, variant.folder) for variant in sweep.variants] == [
        ("SD-FEEL, tau1=1, topology=ring", "SD-FEEL_tau1=1_topology=ring"),
        ("SD-FEEL, tau1=5, topology=ring", "SD-FEEL_tau1=5_topology=ring"),
        ("HierFAVG / exact, tau1=1, topology=ring", "HierFAVG_exact_tau1=1_topology=ring"),
        ("HierFAVG / exact, tau1=5, topology=ring", "HierFAVG_exact_tau1=5_topology=ring"),
    ]
    assert sweep.variants[1].settings == {"method": "sd-feel", "tau1": 5, "topology": "ring"}


def test_the_app_is_relative_to_the_file(write_toml: Callable[..., Path], tmp_path: Path) -> None:
    assert read_sweep(write_toml("", app="../app")).app == tmp_path.parent / "app"


def test_the_app_may_be_one_of_the_suites_by_its_name(
    write_toml: Callable[..., Path], tmp_path: Path
) -> None:
    file = write_toml("", app="sd-feel")
    assert (read_sweep(file).app / "sd_feel" / "server_app.py").is_file()
    # A folder that is there goes first.
    (file.parent / "sd-feel").mkdir()
    assert read_sweep(file).app == file.parent / "sd-feel"


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("""
        titel = "x"
        nodes = 0
        x = "epochs"
        y = 3
        seeds = [1, 1]
        variant = [{method = "feel"}]
        base = {seed = 3}
        grid = {tau1 = 3, alpha = []}
        budget = {seconds = 3}
    """)
    with pytest.raises(ValueError, match=r"bad\.toml") as error:
        read_sweep(file)
    for problem in (
        "titel is not a key",
        "nodes must be an integer from 1 to",
        "app must be given: a folder, relative to the file",
        ", got 'epochs'",
        "y must be a text or a list of texts, got 3",
        "[0, 2^63), got [1, 1]",
        "variant 1: label must be a text, got None",
        "base must not set seed: the sweep sets it",
        "grid: tau1 must be a list of values, got 3",
        "grid: alpha must be a list of values, got []",
        "as {sim-seconds = 60}: budget must be one of iterations, sim-seconds, bits, payload-bytes",
        ", got 'seconds'",
    ):
        assert problem in str(error.value)


def test_a_budget_is_a_setting_of_every_run(write_toml: WriteToml) -> None:
    sweep = read_sweep(write_toml("budget = {sim_seconds = 60}\n[base]\ntau1 = 5"))
    assert sweep.base == {"tau1": 5, "stop-after": "sim-seconds=60"}
