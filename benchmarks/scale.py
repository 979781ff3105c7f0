"""How cost grows: seconds a round, start and memory, over nodes, nodes a round, parameters and workers.

    python benchmarks/scale.py                         # eight minutes on two busy cores
    python benchmarks/scale.py --short                 # a thousand and a million nodes, FedMUD and FEEL
    python benchmarks/scale.py --plot docs/scale.svg --json docs/scale.json

Whole apps on mnist-5k, a process each: FedMUD (``mud+bkd+aad``, ``sync = "dense"``) and FEEL, 20 samples a
node, one local epoch or two local steps of batch 10. Seconds are processor time of one thread, which others
on the machine stretch less than the clock's; of workers they are the clock's. A round is the median after the
first; the start is all of a run that is no round of that length: loading data, making nodes and their
introductions, the first round's caches, checkpoint and table. Imports are not in it. Memory is the process's
peak, torch's 300 MiB included.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from reports import report
from torch import nn

HERE = Path(__file__).resolve().parent
APPS = HERE.parent / "flower_apps"
COMMON = (
    "dataset='mnist-5k' partition='with-replacement(20)' batch-size=10 evaluate-every=1000 quiet=true "
    "train-loss-samples=200"
)
ROUNDS = 5
# Hidden units of perceptrons of 10^4, 10^5, 10^6 and 10^7 parameters.
WIDTHS = {10**4: 13, 10**5: 126, 10**6: 1258, 10**7: 12_579}


def perceptron(width: int, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, num_classes))


perceptron_4, perceptron_5, perceptron_6, perceptron_7 = (partial(perceptron, w) for w in WIDTHS.values())


def settings(app: str, nodes: int, a_round: int, **more: Any) -> str:
    own: dict[str, Any] = {"num-clients": nodes, "clients-per-round": a_round}
    if app == "fedmud":
        own |= {"num-rounds": ROUNDS, "local-epochs": 1, "sync": "dense", "ratio": 0.1}
    else:
        own |= {"method": "feel", "num-servers": 1, "tau1": 2, "tau2": 1, "iterations": 2 * ROUNDS}
    own = {"model": "lenet", "workers": 1, **own, **more}
    return " ".join([COMMON, *(f"{key}={value!r}" for key, value in own.items())])


def child(app: str, config: str) -> None:
    """Run an app in this process, and print what it took as the last line."""
    from hedgerow.sim.runs.app import load_app
    from hedgerow.sim.runs.launch import plan_run, run_app
    from hedgerow.sim.runs.recorder import RunRecorder

    moments = []
    told = RunRecorder.on_round_end

    def on_round_end(recorder: RunRecorder, end: Any) -> None:
        told(recorder, end)
        moments.append((time.process_time(), time.perf_counter()))

    RunRecorder.on_round_end = on_round_end  # type: ignore[method-assign]
    loaded = load_app(APPS / app)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_run(loaded.spec, [f"{config} output-dir='{folder}'"])
        began = time.process_time(), time.perf_counter()
        run_app(loaded, plan)
        ended = time.process_time(), time.perf_counter()
    found = {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10}
    for clock, name in enumerate(("cpu", "wall")):
        rounds = [later[clock] - earlier[clock] for earlier, later in itertools.pairwise(moments[1:])]
        found[f"round-{name}"] = median(rounds)
        found[f"start-{name}"] = ended[clock] - began[clock] - median(rounds) * (len(rounds) + 1)
    print(json.dumps(found))


def run(app: str, nodes: int, a_round: int, **more: Any) -> dict[str, Any]:
    config = settings(app, nodes, a_round, **more)
    command = [
        sys.executable,
        str(HERE / "scale.py"),
        "--child",
        app if app == "fedmud" else "sd-feel",
        config,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    told = {"app": app, "nodes": nodes, "nodes-a-round": a_round, **more, **found}
    print(
        f"{app:<7} {nodes:>9,} nodes, {a_round:>5,} a round {more or ''}: a round {found['round-cpu']:.3f} s "
        f"({found['round-wall']:.3f} by the clock), start {found['start-cpu']:.2f} s "
        f"({found['start-wall']:.2f}), {found['mib']:.0f} MiB",
        flush=True,
    )
    return told


def million() -> list[dict[str, Any]]:
    """A thousand nodes a round, of a thousand and of a million."""
    rows = []
    for app in ("fedmud", "feel"):
        few, many = (run(app, nodes, 1000) for nodes in (1000, 10**6))
        rows += [few, many]
        report(
            f"{app}: a round, 1,000 of 10^6 nodes",
            many["round-cpu"],
            "s",
            few["round-cpu"] / many["round-cpu"],
            "1,000 in all",
        )
        report(f"{app}: start with 10^6 nodes", many["start-cpu"], "s")
        report(f"{app}: memory of 10^6 nodes", many["mib"] / 2**10, "GiB")
    return rows


def growth() -> dict[str, list[dict[str, Any]]]:
    nodes = [run(app, 10**power, 10) for app in ("fedmud", "feel") for power in range(1, 7)]
    a_round = [run(app, 10**6, count) for app in ("fedmud", "feel") for count in (10, 100)]
    parameters = [
        run("feel", 1000, 10, model=f"scale:perceptron_{power}") | {"parameters": 10**power}
        for power in range(4, 8)
    ]
    workers = [run("feel", 1000, 100, workers=count) for count in (1, 2)]
    return {
        "nodes": nodes,
        "nodes-a-round": [*a_round, *million()],
        "parameters": parameters,
        "workers": workers,
    }


def plot(found: dict[str, list[dict[str, Any]]], file: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "scale"
    from matplotlib import pyplot as plt

    figure, places = plt.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    axes = dict(zip(found, places.flat, strict=True))
    for title, place in axes.items():
        rows = found[title]
        memory = place.twinx()
        clock = "wall" if title == "workers" else "cpu"
        for app in dict.fromkeys(row["app"] for row in rows):
            own = [
                row for row in rows if row["app"] == app and (title != "nodes-a-round" or row["nodes"] > 1000)
            ]
            x = [row[title] for row in own]
            colour = {"fedmud": "tab:blue", "feel": "tab:orange"}[app]
            for what, style in (("round", "o-"), ("start", "o:")):
                y = [row[f"{what}-{clock}"] for row in own]
                place.plot(x, y, style, color=colour, label=f"{app}: {what}")
            memory.plot(x, [row["mib"] for row in own], "x--", color=colour)
        if title == "workers":
            place.set_xticks([1, 2])
        else:
            place.set_xscale("log")
        kind = "seconds" if clock == "wall" else "seconds of processor time"
        place.set(xlabel=title.replace("-", " "), ylabel=f"{kind} (solid, dotted)", yscale="log")
        memory.set(ylabel="MiB (dashed)", ylim=(0, None))
    axes["nodes"].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def main(
    short: Annotated[bool, typer.Option(help="a thousand and a million nodes alone")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="a file for the figures")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="an SVG file for their plot")] = None,
) -> None:
    print(f"load before {os.getloadavg()[0]:.1f}", flush=True)
    found = {"nodes-a-round": million()} if short else growth()
    load = os.getloadavg()[0]
    print(f"load after {load:.1f}")
    if json_file is not None:
        json_file.write_text(json.dumps({"load": load, **found}, indent=1) + "\n")
    if plot_file is not None and not short:
        plot(found, plot_file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4])
    else:
        typer.run(main)
