"""Every mistake is one error of a line or two, and only a bug shows where it happened."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.sim.cli.command_line import SD_FEEL, hedgerow

from hedgerow.sim.cli.mistakes import BUG
from hedgerow.sim.runs import launch

COMMANDS = (
    *("run", "sweep", "plot", "table", "export", "data", "plan", "settings", "deploy", "deploy local"),
    *("deploy keys", "plan sd-feel", "plan similarity-free", "plan hsgd"),
)
PLANS = {
    "sd-feel": {
        **dict.fromkeys(("target", "learning-rate", "smoothness", "sigma2", "kappa2", "delta"), float),
        **dict.fromkeys(("num-clients", "num-servers", "num-params", "rows"), int),
    },
    "similarity-free": {
        **dict.fromkeys(("smoothness", "variance", "delta-inf", "initial-gap", "max-gap"), float),
        **dict.fromkeys(("initial-loss", "epsilon", "nu", "compressor-contraction", "topk"), float),
        **dict.fromkeys(("local-iters", "num-rounds", "num-params", "num-nodes"), int),
    },
    "hsgd": {
        **dict.fromkeys(("rho", "delta", "loss-gap", "gradient2", "learning-rate", "target"), float),
        **dict.fromkeys(("compute-seconds",), float),
        **dict.fromkeys(("head", "hospital", "device", "hospital-encoding", "device-encoding"), int),
        **dict.fromkeys(("batch", "num-groups", "iterations", "eta-power", "rows"), int),
    },
}
NEEDED = {
    "sd-feel": {},
    "similarity-free": {"smoothness": "1", "variance": "1"},
    "hsgd": {"rho": "1", "delta": "1", "loss-gap": "1"},
}
NUMBERS = (
    *("0", "-1", "1e200", "1e-300", "1e18", "1e-18", "1e308", "5e-324", "inf", "nan", "1e9", "1e-9", "0.5"),
)
INTEGERS = ("0", "-1", "1", "2", "7", "1000", "1000000000", "9223372036854775808", "9" * 400, "x")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_no_escapes_and_h_is_help(command: str) -> None:
    shown = hedgerow(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "\\[" not in shown.output
    assert hedgerow(*command.split(), "-h").output == shown.output


def test_several_folders_to_resume_are_told_in_one_sentence(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    shown = hedgerow("run", "sd-feel", "--resume", *places)
    assert shown.exit_code == 2
    assert shown.stderr.endswith(
        f"Error: --resume must be one run folder, got '{places[0]}', '{places[1]}'\n"
    )
    assert "unexpected extra argument" in hedgerow("run", "sd-feel", "x").stderr
    assert "unexpected extra argument" in hedgerow("run", "sd-feel", "x", "--resume", places[0]).stderr


@pytest.mark.parametrize("command", ["run sd-feel", "sweep sd-feel", "deploy local sd-feel"])
def test_a_setting_as_an_option_is_told_how_it_is_given(command: str) -> None:
    shown = hedgerow(*command.split(), "--iterations", "10")
    assert shown.exit_code == 2
    assert "No such option '--iterations'" in shown.stderr
    assert 'A setting of the app is given as -c "iterations=VALUE".' in shown.stderr


@pytest.mark.parametrize(
    ("setting", "meant"),
    [("topology=rings", "ring"), ("topology=Torus", "torus"), ("method=fedavgg", "fedavg")],
)
def test_a_misspelt_name_is_answered_with_the_right_one(setting: str, meant: str) -> None:
    shown = hedgerow("run", "sd-feel", "-c", setting)
    assert shown.exit_code == 2
    assert f"did you mean '{meant}'?" in shown.stderr


def test_a_suites_app_is_swept_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = hedgerow("sweep", "sd-feel", "--seeds", "0,1", "--dry-run")
    assert shown.exit_code == 0, shown.output
    assert "sd-feel, seed 1  ->" in shown.output
    missing = hedgerow("sweep", "not-there.toml", "--dry-run")
    assert "sweep file" in missing.stderr


def test_changed_settings_of_all_runs_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, app, changes in (("a", "sd_feel", {"tau1": 7}), ("b", "fedmud", {}), ("c", "sd_feel", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"format": 2, "app": app, "run": changes}))
    (tmp_path / "report.html").touch()
    shown = hedgerow("settings", "sd-feel", "--changed", "a", "b", "c", "report.html")
    assert shown.exit_code == 0, shown.output
    first, second, third = shown.output.split("\n\n")
    assert first.startswith("a\ntau1 = 7\n")
    assert second == "b\na run of fedmud"
    assert third.rstrip() == "c\nall settings are the defaults"
    # Without APP, each run's own.
    first, second, *_ = hedgerow("settings", "--changed", "a", "b", "c").output.split("\n\n")
    assert first.startswith("a\ntau1 = 7\n")
    assert second == "b\nall settings are the defaults"
    assert hedgerow("settings", "--changed", "a").output.startswith("tau1 = 7\n")
    assert hedgerow("settings", "--changed", "a", "report.html").output.startswith("a\ntau1 = 7\n")


@pytest.mark.parametrize(
    ("app", "copy", "options", "words"),
    [
        ("mine", "sd_feel", "--changed run", "tau1 = 7"),
        ("of-nobody", "", "--changed run", "APP must be given: run is a run of 'of-nobody'"),
        ("of-nobody", "", "--changed runs", "runs is not a run folder"),
        ("of-nobody", "", "", "APP must be given, or --changed RUN"),
        ("of-nobody", "", "--write --changed run", "--write must be used without --changed"),
        ("of-nobody", "", "sd-feel run", "a run must be given by --changed"),
    ],
)
def test_a_run_says_whose_settings_it_changed(
    app: str, copy: str, options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    config = {"format": 2, "app": app, "run": {"tau1": 7}, **({"copy-of": copy} if copy else {})}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    shown = hedgerow("settings", *options.split())
    assert words in " ".join((shown.stdout + shown.stderr).split())
    assert shown.exit_code == (0 if copy else 2)


def test_the_version_is_told() -> None:
    assert hedgerow("--version").output.startswith("hedgerow ")


def raised_in(file: str, error: str) -> Any:
    """Return a function of a file that raises an error."""
    made: dict[str, Any] = {}
    exec(compile(f"def broken(*_, **__):\n    raise {error}", file, "exec"), made)
    return made["broken"]


def test_a_bug_says_where_it_happened_and_to_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launch, "run_app", raised_in(launch.__file__, "KeyError('a bug')"))
    shown = hedgerow("run", SD_FEEL, "-c", f"output-dir='{tmp_path}'")
    assert shown.exit_code == 1
    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1] == BUG


@pytest.mark.parametrize("checkpoint", [True, False])
def test_an_interrupted_run_says_how_to_go_on_if_it_can(
    checkpoint: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        folder = tmp_path / "out" / "sd_feel-1"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if checkpoint:
            (folder / "checkpoint").mkdir()
            (folder / "checkpoint" / "latest.safetensors").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_app", interrupted)
    shown = hedgerow("run", SD_FEEL, "-c", f"output-dir='{tmp_path / 'out'}'")
    assert shown.exit_code == 130
    how = f"; go on with: hedgerow run {SD_FEEL} --resume {tmp_path / 'out' / 'sd_feel-1'}"
    assert shown.stderr == f"Interrupted{how if checkpoint else ''}\n"


def test_a_bad_value_of_every_run_of_a_sweep_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f'app = "{SD_FEEL}"\nseeds = [0, 1, 2]\nbase = {{tau1 = -1}}\n')
    shown = hedgerow("sweep", tmp_path / "s.toml", "--dry-run")
    assert shown.exit_code == 2
    assert shown.stderr.count("tau1 must be an integer from 1 to 2^20, got -1") == 1
    assert "all, seed 0 and 2 more" in shown.stderr


def run_plans(name: str, seed: int, count: int) -> None:
    rng = random.Random(f"{name}-{seed}")
    kinds = PLANS[name]
    for _ in range(count):
        options = dict(NEEDED[name])
        for key in rng.choices(list(kinds), k=rng.randrange(1, 4)):
            options[key] = rng.choice(NUMBERS if kinds[key] is float else INTEGERS)
        shown = hedgerow("plan", name, *(f"--{key}={value}" for key, value in options.items()))
        assert shown.exit_code in (0, 2), (options, shown.output)
        assert "Traceback" not in shown.stderr, (options, shown.stderr)
        assert shown.exit_code == 0 or not shown.stdout, (options, shown.stdout)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_wild_numbers_is_made_or_is_one_error(name: str) -> None:
    run_plans(name, seed=0, count=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_many_plans_of_wild_numbers_are_made_or_are_one_error(name: str) -> None:
    run_plans(name, seed=1, count=1000)


def test_an_unknown_command_is_answered_with_one_suggestion() -> None:
    shown = hedgerow("rn")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1] == "Error: No such command 'rn' (did you mean 'run'?)"
    assert hedgerow("deploy", "kyes").stderr.count("'keys'") == 1
    assert hedgerow("zzz").stderr.splitlines()[-1] == "Error: No such command 'zzz'"


def test_a_nodes_right_files_and_config_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hedgerow("deploy", "keys", "k", "--nodes", "1", "--host", "127.0.0.1").exit_code == 0
    started: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda _, command, __: started.append(command))
    files = ["--root-certificates", "k/ca.crt", "--auth-supernode-private-key", "k/node0"]
    arguments = ["--superlink", "127.0.0.1:9", *files, "--node-config", 'data="x.csv" partition-id=0']
    assert hedgerow("node", *arguments).exit_code == 0
    assert started[0][-len(arguments) :] == arguments


def test_a_data_set_that_comes_with_a_package_is_found_in_it() -> None:
    assert "breast masses" in hedgerow("data").output
    assert "found in scikit-learn\n" in hedgerow("data").output
