"""Plan the runs of a sweep: variants x seeds, all checked before any starts.

Common random numbers: an app derives data partition, initial model and mini-batches from the run config's
``seed`` alone. Runs with one seed thus differ only in their settings, and variants can be compared by seed.
An app without that key is run with ``hedgerow run --seed``, which seeds the global generators of Python,
NumPy and torch; whether that determines the run depends on the app.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from flwr.app import UserConfig

from hedgerow.sim.engine._compat import read_toml
from hedgerow.sim.runs.app import AppSpec, find_app
from hedgerow.sim.runs.common_settings import role_of
from hedgerow.sim.runs.folder import opened, read_config, refused
from hedgerow.sim.runs.plan import Plan, parse_overrides, plan_run, toml_text
from hedgerow.sim.runs.settings import Role
from hedgerow.sim.runs.sweep_file import RESERVED, Sweep, Variant

# File of a run's whole run config, in its folder.
SETTINGS_FILE = "settings.toml"


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Parameters
    ----------
    variant : Variant
        The variant that it repeats.
    seed : int
        Its seed.
    folder : Path
        Folder of the finished run; beside it are ``.partial`` (running or interrupted), ``.failed`` and
        ``.log``.
    settings : dict
        The whole run config, including defaults.
    kept : bool
        Whether it is already finished. A run that now has more iterations is not: it is resumed.
    options : tuple of str (default: none)
        Options of ``hedgerow run`` other than settings.
    """

    variant: Variant
    seed: int
    folder: Path
    settings: UserConfig
    kept: bool
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Label and seed."""
        return f"{self.variant.label}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """File of the run's output."""
        return self.beside("log")

    def beside(self, suffix: str) -> Path:
        """Return the path of the folder's name with a suffix."""
        return self.folder.with_name(f"{self.folder.name}.{suffix}")


def plan_sweep(
    sweep: Sweep, out: Path, overrides: Sequence[str] = (), *, track: Sequence[str] = ()
) -> list[Job]:
    """Return every run of a sweep, checked against the app's settings.

    Parameters
    ----------
    sweep : Sweep
        From ``read_sweep``.
    out : Path
        The sweep's folder.
    overrides : sequence of str
        Run-config changes for all runs, as in ``plan_run``, except of keys that the sweep varies.
    track : sequence of str
        Trackers of every run, see ``trackers.check_trackers``.

    Raises
    ------
    ValueError
        If there is no app, a setting is invalid, or a finished run in ``out`` had other settings.
    """
    spec = find_app(sweep.app)
    changes = parse_overrides(overrides, spec.config)
    _check_overrides(sweep, changes)
    jobs: list[Job] = []
    problems: dict[str, list[str]] = {}
    for variant, seed in product(sweep.variants, sweep.seeds):
        asked = {**sweep.base, **changes, **variant.settings}
        folder = out.resolve() / variant.folder / f"seed-{seed}"
        try:
            plan = _plan(spec, asked, sweep.nodes, seed)
            kept = _is_kept(folder, plan, spec.config)
            options = _options(plan, sweep.nodes, track)
            jobs.append(Job(variant, seed, folder, plan.run_config, kept, options))
        except ValueError as error:
            problems.setdefault(str(error), []).append(f"{variant.label}, seed {seed}")
    if problems:
        raise ValueError("\n".join(f"{_first(names)}: {said}" for said, names in problems.items()))
    return jobs


def _first(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _check_overrides(sweep: Sweep, changes: UserConfig) -> None:
    reserved = [key for key in changes if key in RESERVED]
    if reserved:
        raise ValueError(f"-c must not set {', '.join(reserved)}: the sweep sets it")
    varied = {key for variant in sweep.variants for key in variant.settings}
    clash = sorted(varied & set(changes))
    if clash:
        raise ValueError(f"-c must not set {', '.join(clash)}: variants of the sweep file set it")


def _plan(spec: AppSpec, asked: UserConfig, nodes: int | None, seed: int) -> Plan:
    """Return the plan of a run, checked as ``hedgerow run`` will check it."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / SETTINGS_FILE
        file.write_text(toml_text(asked), encoding="utf-8")
        return plan_run(spec, [str(file)], num_nodes=nodes, seed=seed)


def _options(plan: Plan, nodes: int | None, track: Sequence[str]) -> tuple[str, ...]:
    """Return the options of ``hedgerow run`` that are not settings."""
    seed = [] if plan.seed is None else ["--seed", str(plan.seed)]
    size = [] if nodes is None else ["--nodes", str(nodes)]
    return (*seed, *size, *(word for name in track for word in ("--track", name)))


def _is_kept(folder: Path, plan: Plan, defaults: UserConfig) -> bool:
    if not folder.exists():
        return False
    if not (folder / "summary.json").is_file() or not (folder / SETTINGS_FILE).is_file():
        raise ValueError(
            f"{folder} exists and is not a finished run of a sweep; remove it or choose another --out"
        )
    changed = changed_settings(folder / SETTINGS_FILE, plan.run_config, defaults)
    nodes = read_config(folder).get("nodes", plan.num_nodes)
    if nodes != plan.num_nodes:
        changed.append(f"{nodes} nodes, now {plan.num_nodes}")
    if changed and can_resume(folder, folder / SETTINGS_FILE, plan.run_config, defaults):
        return False
    if changed:
        raise ValueError(f"{folder} was run with {'; '.join(changed)}; remove it or choose another --out")
    return True


def can_resume(run: Path, file: Path, settings: UserConfig, defaults: UserConfig | None = None) -> bool:
    """Return whether a run made with the settings in ``file`` can be resumed with the present settings.

    It must have a checkpoint, and its app the key ``resume``; only ``iterations`` may differ, and only grow.
    """
    before = {**(defaults or {}), **_stored(file)}
    if "resume" not in settings or not (run / "checkpoint").is_dir():
        return False
    changed = _changed(before, settings)
    return not changed or (
        changed == ["iterations"] and int(before["iterations"]) < int(settings["iterations"])
    )


def changed_settings(file: Path, settings: UserConfig, defaults: UserConfig | None = None) -> list[str]:
    """Return the settings of an earlier run that differ from the present ones.

    A key that the app did not have then counts with its value in ``defaults``.
    """
    before = {**(defaults or {}), **_stored(file)}
    return [f"{key} = {before.get(key)!r}, now {settings.get(key)!r}" for key in _changed(before, settings)]


def _stored(file: Path) -> UserConfig:
    with refused(file.parent), opened(file):
        return read_toml(file)


def _changed(before: UserConfig, settings: UserConfig) -> list[str]:
    keys = sorted({*before, *settings})
    return [
        key for key in keys if before.get(key) != settings.get(key) and role_of(key) is not Role.IRRELEVANT
    ]
