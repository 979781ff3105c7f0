"""Every benchmark in one run with short settings, as one markdown table.

    python benchmarks/all.py                             # to the terminal
    python benchmarks/all.py --out table.md --only engine,training
    python benchmarks/all.py --env pfl=PYTHON --env fedjax=PYTHON    # peers too, see peers.py

Scripts run one after the other, each in a process of its own; one that cannot run here, or takes longer than
``--seconds``, is named with the reason. With short settings figures are rough: each script's own defaults
are for those that are published.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from reports import REPORT

# What ``report`` wrote.
Finding = dict[str, Any]
HERE = Path(__file__).resolve().parent
# Each script with its short settings; a script may be there more than once.
RUNS: Sequence[tuple[str, ...]] = (
    ("engine", "overhead", "--repeats", "1"),
    ("engine", "sd-feel", "--repeats", "1"),
    ("engine", "thousand", "--repeats", "1"),
    ("engine", "workers", "--repeats", "1"),
    ("any_app", "--repeats", "1"),
    ("messages", "--short"),
    ("scale", "--short"),
    ("training", "--repeats", "3", "--only", "lenet"),
    ("lowrank", "--repeats", "1", "--model", "cnn4", "--ratio", "0.04"),
    ("onebit", "--draws", "1"),
    ("onebit", "--full", "1", "--phi", "srht"),
    ("hsgd_work",),
    ("privacy", "sealed", "--repeats", "1"),
    ("privacy", "sums", "--repeats", "1"),
    ("poison", "--cost-only"),
    ("deployment", "--rounds", "2"),
    ("edge",),
    ("gpu",),
    ("peers", "--repeats", "2"),
)


def main(
    out: Annotated[Path | None, typer.Option(help="a file for the table")] = None,
    only: Annotated[str, typer.Option(help="scripts, with commas; all without")] = "",
    env: Annotated[list[str] | None, typer.Option(help="of peers.py: pfl=PYTHON, ...")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="of hsgd_work.py: where its data are")] = None,
    seconds: Annotated[int, typer.Option(min=1, help="the most that one script may take")] = 480,
) -> None:
    names = [name for name in only.split(",") if name]
    if unknown := sorted(set(names) - {run[0] for run in RUNS}):
        raise typer.BadParameter(
            f"--only must be one of {', '.join(sorted({r[0] for r in RUNS}))}, got {unknown[0]}"
        )
    lines = [*_heading(), "| benchmark | what | value | ratio (to) |", "|---|---|---:|---:|"]
    left_out = []
    for name, *arguments in RUNS:
        if names and name not in names:
            continue
        extra = [part for entry in env or [] for part in ("--env", entry)] if name == "peers" else []
        extra += ["--data-dir", str(data_dir)] if name == "hsgd_work" and data_dir else []
        called = " ".join([name, *arguments])
        began = time.monotonic()
        found, reason = list[Finding](), _missing(name, env)
        if not reason:
            found, reason = _run(name, [*arguments, *extra], seconds)
        print(f"{called}: {time.monotonic() - began:.0f} s{f', {reason}' if reason else ''}", flush=True)
        first, before = f"`{called}`", ""
        for one in found:
            # A call, and a value that is compared more than once, are named in their first row only.
            value = f"{one['what']} | {one['value']:.4g} {one['unit']}"
            ratio = "" if one["ratio"] is None else f"{one['ratio']:.3g} ({one['of']})"
            lines.append(f"| {first} | {' | ' if value == before else value} | {ratio} |")
            first, before = "", value
        if reason:
            left_out.append(f"- `{called}`: {reason}")
    if left_out:
        lines += ["", "Left out, or not to the end:", "", *left_out]
    lines += ["", f"Load at the end {os.getloadavg()[0]:.1f}."]
    print("\n" + "\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


def _missing(name: str, env: list[str] | None) -> str:
    """Return why a script cannot run here; nothing if it can."""
    if not (HERE / f"{name}.py").is_file():
        return "there is no such script"
    if name == "gpu" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return "no environments of the peers (--env)" if name == "peers" and not env else ""


def _run(name: str, arguments: Sequence[str], seconds: int) -> tuple[list[Finding], str]:
    """Return what a script found, and what it ended of where it did not end by itself."""
    with tempfile.TemporaryDirectory() as folder:
        file, reason = Path(folder) / "found.jsonl", ""
        command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
        try:
            done = subprocess.run(
                command, env={**os.environ, REPORT: str(file)}, timeout=seconds, check=False,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            reason = f"ended after {seconds} s"
        else:
            if done.returncode:
                last = (done.stdout.strip() or "it said nothing").splitlines()[-1]
                reason = f"exited with {done.returncode}: {last[:200]}"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return found, reason or ("" if found else "it found nothing to report")


def _heading() -> list[str]:
    model = next(
        (line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    memory = next((int(line.split()[1]) / 2**20 for line in _read("/proc/meminfo")), 0.0)
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    if torch.cuda.is_available():
        model = f"{torch.cuda.get_device_name()}, {model}"
    return [
        f"Commit {commit}, {time.strftime('%Y-%m-%d')}. {model}, {os.cpu_count()} cores, {memory:.0f} GiB; "
        f"Python {platform.python_version()}, torch {torch.__version__}, flwr {version('flwr')}; "
        f"load at the start {os.getloadavg()[0]:.1f}. Ratios are of one run; above 1 is better.",
        "",
    ]


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    typer.run(main)
