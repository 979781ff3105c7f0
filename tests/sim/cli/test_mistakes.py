"""Every mistake is one error of a line or two, and only a bug shows where it happened."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sim.cli.command_line import APPS, SD_FEEL, hedgerow
from tests.sim.tiny_app import MakeApp

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
    "0",
    "-1",
    "1e200",
    "1e-300",
    "1e18",
    "1e-18",
    "1e308",
    "5e-324",
    "inf",
    "nan",
    "1e9",
    "1e-9",
    "0.5",
    "2",
)
INTEGERS = ("0", "-1", "1", "2", "7", "1000", "1000000000", "9223372036854775808", "9" * 400, "x")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_escapes(command: str) -> None:
    shown = hedgerow(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "\\[" not in shown.output


def test_the_version_is_told() -> None:
    assert hedgerow("--version").output.startswith("hedgerow ")


def test_completion_can_be_installed() -> None:
    assert "--install-completion" in hedgerow("--help").output


def test_a_bug_says_where_it_happened_and_to_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(launch, "run_app", broken)
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
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_app", interrupted)
    shown = hedgerow("run", SD_FEEL, "-c", f"output-dir='{tmp_path / 'out'}'")
    assert shown.exit_code == 130
    how = f"; go on with: hedgerow run {SD_FEEL} --resume {tmp_path / 'out' / 'sd_feel-1'}"
    assert shown.stderr == f"Interrupted{how if checkpoint else ''}\n"


@pytest.mark.parametrize(
    ("app", "override", "words"),
    [
        ("sd-feel", "topology=ring(2)", "topology is 'ring(2)'; valid is 'ring'"),
        ("sd-feel", 'dataset="x:"', "dataset = 'x:'; valid is"),
        ("sd-feel", "dataset=os:sep", "dataset = 'os:sep': 'os' has no function 'sep'"),
        ("sd-feel", f"seed={'9' * 400}", "seed=99999"),
        ("sd-feel", f"seed={'9' * 5000}", "an integer is needed, like 0"),
        ("sd-feel", 'data-dir="~nosuchuser"', "there is no such user"),
        ("sd-feel", "partition=shards(9999)", "are more shards than"),
        ("sd-feel", "num-clients=5000", "num_partitions = 5000"),
        ("ceps", "topology=erdos-renyi(0)", "valid is erdos-renyi(p) with 0 < p <= 1"),
        ("ceps", "problem=logistic class-0=1", "valid is another class than class-0"),
        ("ceps", "problem=logistic class-0=77", "valid is two of 0 to 9"),
        ("ceps", "noise=1e308", "valid is a number from 0 to 1e6"),
        ("ceps", "features=1000000000000", "valid is an integer from 1 to 2^24"),
        ("hsgd", "partition=pairs(a,b)", "partition = 'pairs(a,b)'"),
        ("hsgd", "partition=rates(nan)", "partition = 'rates(nan)'"),
        ("hsgd", "num-clients=0", "num-clients=0: an integer >= 1 is needed"),
        ("fedmud", "skip-front=9", "skip_front + skip_back is 10; valid is"),
        ("fedmud", "fault-stragglers=999", "fault-stragglers: [999] of 10 nodes; valid are partition ids"),
    ],
)
def test_a_mistake_is_one_error_before_anything_is_written(
    app: str, override: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = hedgerow("run", APPS / app, "-c", override)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown = hedgerow("run", SD_FEEL, "-c", f"output-dir='{tmp_path / 'file'}'")
    assert shown.exit_code == 2
    assert "is a file" in shown.stderr


@pytest.mark.parametrize("command", ["run", "plot", "sweep", "settings"])
def test_a_user_that_is_not_there_is_no_bug(command: str) -> None:
    shown = hedgerow(command, "~nosuchuser/x")
    assert shown.exit_code == 2, shown.output
    assert "Traceback" not in shown.stderr


def test_an_unknown_key_of_a_sweep_file_is_answered_with_the_key_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f'app = "{SD_FEEL}"\nsedes = [1]\n')
    shown = hedgerow("sweep", tmp_path / "s.toml", "--dry-run")
    assert shown.exit_code == 2
    assert "sedes: not a key of a sweep file (did you mean 'seeds'?)" in shown.stderr


def test_a_bad_value_of_every_run_of_a_sweep_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(f'app = "{SD_FEEL}"\nseeds = [0, 1, 2]\nbase = {{tau1 = -1}}\n')
    shown = hedgerow("sweep", tmp_path / "s.toml", "--dry-run")
    assert shown.exit_code == 2
    assert shown.stderr.count("tau1 = -1; valid is an integer from 1 to 2^20") == 1
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
    run_plans(name, seed=0, count=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_many_plans_of_wild_numbers_are_made_or_are_one_error(name: str) -> None:
    run_plans(name, seed=1, count=1000)


def test_a_failing_app_of_another_is_no_bug_of_hedgerow(make_app: MakeApp) -> None:
    shown = hedgerow("run", make_app(), "-c", "fail=true")
    assert shown.exit_code == 1
    assert BUG not in shown.stderr


@pytest.mark.parametrize(
    ("app", "config", "words"),
    [
        ("sd-feel", "{}", "config.json is damaged: it has no settings ('run')"),
        ("sd-feel", '{"run": []}', "config.json is damaged: its 'run' holds no settings"),
        ("", "{}", "does not say how many nodes its run had"),
        ("", '{"nodes": 2}', "config.json is damaged: it has no settings ('run')"),
    ],
)
def test_resuming_a_folder_without_settings_is_one_error(
    app: str, config: str, words: str, make_app: MakeApp, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(config)
    shown = hedgerow("run", APPS / app if app else make_app(), "--resume", tmp_path / "run")
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data", "--data-dir", "~nosuchuser/x"], "there is no such user"),
        (
            ["deploy", "keys", "k", "--nodes", "1", "--days", "9" * 20],
            "days must be an integer from 1 to 3650",
        ),
        (["deploy", "keys", "k", "--nodes", "9" * 20], "nodes must be an integer from 0 to 10000"),
        (["deploy", "keys", "k", "--nodes", "9" * 20, "--edges", "2"], "nodes must be an integer from 0 to"),
        (["deploy", "keys", "k", "--nodes", "9", "--edges", "9" * 20], "edges must be an integer from 1 to"),
    ],
)
def test_a_bad_value_of_a_command_that_is_no_run_is_one_error(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = hedgerow(*arguments)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert words in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_command_is_answered_with_one_suggestion() -> None:
    shown = hedgerow("rn")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1] == "Error: No such command 'rn' (did you mean 'run'?)"
    assert hedgerow("deploy", "kyes").stderr.count("'keys'") == 1
    assert hedgerow("zzz").stderr.splitlines()[-1] == "Error: No such command 'zzz'"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tau1=1.5", "tau1=1.5: an integer is needed, like 5"),
        ("learning-rate=fast", "learning-rate=fast: a number is needed, like 0.05"),
        ("quiet=1", "quiet=1: true or false is needed, like false"),
        ("topology=1", 'topology=1: a text is needed, like "ring"'),
    ],
)
def test_a_value_of_another_kind_is_told_which_kind_is_needed(override: str, words: str) -> None:
    shown = hedgerow("run", SD_FEEL, "-c", override)
    assert shown.exit_code == 2
    assert words in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", SD_FEEL, "-c", "no.toml"], "run config no.toml: No such file or directory"),
        (["sweep", "no.toml"], "no.toml: No such file or directory"),
        (["table", "no.json"], "no.json: neither a run's folder"),
        (["run", SD_FEEL, "--resume", "none"], "none is not the folder of a run"),
        (["report", "RUN", "--out", "file/x.html"], "file: File exists"),
        (["new", "fedmud", "file/x"], "Not a directory"),
        (["deploy", "keys", "file/x", "--nodes", "1"], "Not a directory"),
    ],
)
def test_what_the_system_refuses_is_told_in_words(
    arguments: list[str], words: str, write_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run("run", [2.0, 1.0])
    monkeypatch.chdir(run.parent)
    (run.parent / "file").touch()
    shown = hedgerow(*(str(run) if one == "RUN" else one for one in arguments))
    assert shown.exit_code == 2, shown.output
    assert words in shown.stderr
    assert "Errno" not in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_node_without_arguments_says_what_it_needs() -> None:
    shown = hedgerow("node")
    assert shown.exit_code == 2
    assert "hedgerow node --superlink HOST:PORT" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--root-certificates", "no.crt"], "--root-certificates no.crt: there is no such file"),
        (["--root-certificates=junk"], "--root-certificates junk: not a PEM certificate"),
        (["--insecure", "--auth-supernode-private-key", "node9"], "node9: there is no such file"),
        (["--insecure", "--node-config", "data=x.csv"], "--node-config data=x.csv: must be KEY=VALUE pairs"),
    ],
)
def test_a_nodes_wrong_files_and_config_are_one_error_before_it_dials(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("the SuperNode was started"))
    (tmp_path / "junk").write_text("junk")
    shown = hedgerow("node", "--superlink", "127.0.0.1:9", *arguments)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert words in shown.stderr


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
    assert started[0][1:] == arguments


def test_a_data_set_that_comes_with_a_package_is_found_in_it() -> None:
    assert "breast masses" in hedgerow("data").output
    assert "found in scikit-learn\n" in hedgerow("data").output


@pytest.mark.parametrize(
    ("app", "key", "meant"),
    [
        ("sd-feel", "lr", "learning-rate"),
        ("sd-feel", "epochs", "iterations"),
        ("sd-feel", "num-rounds", "iterations"),
        ("sd-feel", "clients", "num-clients"),
        ("sd-feel", "Learning_Rate", "learning-rate"),
        ("similarity-free", "lr", "fixed-c"),
        ("similarity-free", "epochs", "local-iters"),
        ("similarity-free", "iterations", "num-rounds"),
        ("fedmud", "epochs", "local-epochs"),
        ("hsgd", "rounds", "iterations"),
    ],
)
def test_a_key_of_another_library_is_answered_with_the_apps_own(app: str, key: str, meant: str) -> None:
    shown = hedgerow("run", APPS / app, "-c", f"{key}=1")
    assert shown.exit_code == 2
    assert f"has no such key (did you mean '{meant}'?)" in shown.stderr


def test_an_unknown_app_is_answered_with_the_one_that_was_meant() -> None:
    for command in ("run", "settings", "check"):
        shown = hedgerow(command, "sdfeal")
        assert shown.exit_code == 2
        assert "(did you mean 'sd-feel'?)" in shown.stderr


def test_quiet_has_a_short_form(make_app: MakeApp, tmp_path: Path) -> None:
    shown = hedgerow("run", make_app(), "--nodes", "3", "-q", "-c", "output-dir=out")
    assert shown.exit_code == 0, shown.output
    assert "round 2/2" not in shown.output
