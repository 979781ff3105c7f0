"""Every mistake on the command line is one error in words, exits with 2, and writes nothing."""

import shlex
from pathlib import Path

import pytest
from tests.sim.cli.command_line import APPS, SD_FEEL, hedgerow
from tests.sim.conftest import WriteRun
from tests.sim.tiny_app import MakeApp

TORCH_APP = Path(__file__).parents[1] / "torch_app"
# Commands in a folder that has an app, a sweep of runs, an empty run, a file and a folder with a file.
COMMANDS = {"RUN": f"run {SD_FEEL}", "TORCH": f"run {TORCH_APP}", "LOCAL": f"deploy local {SD_FEEL}"}
COMMANDS["CEPS"] = f"deploy local {APPS / 'ceps'} --sites 2"
COMMANDS["NODE"] = "node --superlink 127.0.0.1:9 --insecure"
COMMANDS["HSGD"] = "plan hsgd --rho 0.5 --delta 0.5 --loss-gap 2.3"
COMMANDS["GIVEN"] = "plan similarity-free --smoothness 2 --variance 0.25"

# fmt: off
REFUSED = [
    # Settings of apps; every key's ranges are in tests/contracts/test_refusals.py.
    ("RUN -c 'dataset=\"x:\"'", "dataset must be one of mnist-5k,"),
    (f"RUN -c seed={'9' * 5000}", "seed must be an integer, like 0"),
    ("RUN -c 'data-dir=\"~nosuchuser\"'", "there is no such user"),
    ("RUN -c num-clients=5000", "num_partitions must be from 1 to 4000 (one sample each), got 5000"),
    ("run hsgd -c 'partition=pairs(a,b)'", ", or sites, got 'pairs(a,b)'"),
    ("run fedmud -c skip-front=9", "skip_front + skip_back must be less than 5, "),
    # Keys of other libraries, near misses.
    ("RUN -c lr=1", "has no such key (did you mean 'learning-rate'?)"),
    ("run similarity-free -c lr=1", "has no such key (did you mean 'fixed-c'?)"),
    ("run sdfeal", "(did you mean 'sd-feel'?)"),
    ("settings sdfeal", "(did you mean 'sd-feel'?)"),
    ("new sdfeal", "sd-feel, similarity-free, got 'sdfeal' (did you mean 'sd-feel'?)"),
    # Runs.
    ("run app --engine flower --strict", "--strict must be used with --engine inprocess"),
    ("run app --engine flower --real-time", "--real-time must be used with --engine inprocess"),
    ("run app --engine flower -c fault-dropout=0.1", "fault-* must be used with `hedgerow run"),
    ("run app --nodes 2 --node-config '2: a=1'", "partitions must be from 0 to 1"),
    ("run app --track mlfow", "got 'mlfow' (did you mean 'mlflow'?)"),
    ("RUN --resume begun", "config.json is damaged: it has no 'run'"),
    ("run app --resume begun", "does not record the number of nodes"),
    ("RUN -c no.toml", "run config no.toml: No such file or directory"),
    ("TORCH -c seed=1", "seed=1: app 'torch-app' has no such key (use --seed)"),
    ("TORCH --engine flower --seed 1", "--seed: app 'torch-app' has no key 'seed'"),
    (f"TORCH --seed {2**63}", "seed must be an integer in [0, 2^63)"),
    ("settings app", "app 'tiny-app' has no module tinyapp.settings"),
    ("new sd-feel my_app", "FOLDER must be a letter, then up to 31 letters"),
    ("new sd-feel full", "FOLDER must be new or empty"),
    ("new fedmud file/x", "Not a directory"),
    *((f"sweep {TORCH_APP} --dry-run --seeds={seeds}", "--seeds must be distinct integers in [0, 2^63)")
        for seeds in ("", "1,1", 2**63)),
    (f"sweep {TORCH_APP} --dry-run --engine flower", "app 'torch-app' writes no run folder there; use --"),
    (f"sweep {TORCH_APP} --dry-run --engine flower --track mlflow", "--track must be used with --engine in"),
    # What reads runs.
    ("table no.json", "no.json: neither a run's folder"),
    ("table made --budget rounds", "--budget must be name=number, got 'rounds'"),
    ("table made --target f1=0.5", "y must be a metric of "),
    ("report made -o page.pdf", "--out must be a file whose name ends with .html, got 'page.pdf'"),
    ("report made --target loss", "--target must be name=number, got 'loss'"),
    ("report made --x money", "x must be one of rounds, iterations"),
    ("report made --out file/x.html", "file: File exists"),
    ("export made", "nothing to write: give --csv FILE, --json FILE, --tensorboard FOLDER, --onnx FILE,"),
    ("watch none", "does not exist; a run prints its folder"),
    ("watch made/A/seed-0 --host 256.1.1.1", "cannot listen on --host '256.1.1.1' --port 0"),
    ("plot ~nosuchuser/x", "Could not determine home directory. Valid after ~ in a path is"),
    ("data --data-dir ~nosuchuser/x", "there is no such user"),
    # Plans.
    ("plan hsgd --rho 1", "--delta, --loss-gap or --from-run"),
    ("HSGD --eta-power 4", "--eta-power must be 3 or 2, got 4"),
    (f"HSGD --app {SD_FEEL}", "--app must be hsgd"),
    ("plan similarity-free", "--smoothness and --variance, or --from-run"),
    ("GIVEN --topk 0.01", "--topk needs --num-params too, got 0.01 alone"),
    ("GIVEN --from-run nowhere --initial-loss 1", "must not be used with --from-run, which has losses"),
    # Deployments.
    ("LOCAL -c fault-dropout=0.1", "fault-* must be used with `hedgerow run --engine inprocess`"),
    ("LOCAL --node-config data_dir=/a", "did you mean 'data-dir'?"),
    ("LOCAL --nodes 2 -c num-servers=2 --node-config '2: role=hub'", "partitions must be from 0 to 1"),
    ("LOCAL --level E3 --edges 2 -c partition=own", "partition must be one of a data set"),
    ("LOCAL --level E3 --edges 2 -c fault-dropout=0.1", "fault-* must be used with `hedgerow run"),
    ("LOCAL --level E3 --edges 2 -c method=fedavg", "must be 'emulated' but for method = 'sd-feel'"),
    ("LOCAL --level E3 --own-data somewhere", "--own-data must not be used with --level E3"),
    ("LOCAL --sites 2", "--sites must be used with an app that has the key 'site'"),
    ("CEPS --edges 2", "--sites must not be used with --level or --edges"),
    ("CEPS --own-data somewhere", "--own-data must not be used with --sites"),
    ("CEPS --nodes 1 -c topology=path", "peers must have at most 1 sites, a node for each"),
    (f"deploy keys k --nodes 1 --days {'9' * 20}", "days must be an integer from 1 to 3650"),
    ("deploy split mnist-5k own", "exactly one of --nodes and --groups must be given"),
    ("deploy split mnist-5k own --nodes 2 --layout edges", "--layout must not be used with --nodes"),
    ("deploy split breast-cancer own --groups 2 --scaling unit", "--scaling must not be used with --groups"),
    ("deploy split breast-cancer own --groups 2 --layout rings",
        "layout must be edges or devices, got 'rings'"),
    ("node", "hedgerow node --superlink HOST:PORT"),
    ("node --superlink 127.0.0.1:9 --root-certificates no.crt", "must be an existing file, got no.crt"),
    ("NODE --auth-supernode-private-key node9", "must be an existing file, got node9"),
    ("NODE --node-config data=x.csv", "--node-config data=x.csv: must be KEY=VALUE pairs"),
]
# fmt: on


@pytest.fixture
def place(make_app: MakeApp, write_sweep: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_app()
    write_sweep({"A": {0: [2.0, 1.0]}, "B": {0: [2.0, 0.8]}})
    for folder in ("begun", "full"):
        (tmp_path / folder).mkdir()
    (tmp_path / "begun" / "config.json").write_text("{}")
    (tmp_path / "full" / "notes.txt").touch()
    (tmp_path / "file").touch()
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("a SuperNode was started"))
    return tmp_path


@pytest.mark.parametrize(("command", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_mistake_is_one_error_in_words_before_anything_is_written(
    command: str, words: str, place: Path
) -> None:
    def there() -> set[Path]:
        return {path for path in place.rglob("*") if "__pycache__" not in path.parts}

    before = there()
    first, *rest = shlex.split(command)
    shown = hedgerow(*shlex.split(COMMANDS.get(first, first)), *rest)
    assert (shown.exit_code, shown.stdout) == (2, ""), shown.output
    assert words in " ".join(shown.stderr.split())
    assert "Traceback" not in shown.stderr
    assert "Errno" not in shown.stderr
    assert there() == before
