"""``hedgerow new``: a copy of one of the suite's apps, with a module for your model and data."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hedgerow.sim.cli.options import bad_options
from hedgerow.sim.runs.hooks import descriptions, hedgerow_table, shipped_app, shipped_apps

if TYPE_CHECKING:
    from flwr.app import UserConfigValue

# Model and data, if the app has no new/task.py.
_TEMPLATE = Path(__file__).parent / "templates" / "task.py"
# Flower's rule for the name of an app and of its folder.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
# Settings for new apps in the app's pyproject.toml, which are removed from the copy.
_TABLE = re.compile(r"\n(#[^\n]*\n)*\[tool\.hedgerow\.new\]\n([^\[\n][^\n]*\n)*")

_IGNORED = """runs/
.venv/
__pycache__/
*.egg-info/
build/
dist/
*.fab
"""

_README = """# {name}

{description}. This app was made by `hedgerow new {method}`.

1. Replace the example model and data in [`{package}/task.py`]({package}/task.py) with your own.
2. Change the settings in `pyproject.toml` under `[tool.flwr.app.config]`. `hedgerow settings .` lists each
   key with its meaning and valid values.
3. Run it in this folder:

```bash
hedgerow run .                            # in this process, without Ray
hedgerow run . -c "seed=1"                # with other settings
hedgerow run . --engine flower            # on Flower's simulation
hedgerow deploy local . -c "num-rounds=2" # two rounds on SuperNodes on this machine
flwr build                                # as a Flower App Bundle
```

`{package}/server_app.py` defines the model and the strategy, `{package}/client_app.py` the nodes, and
`{package}/settings.py` the settings. You can change all three.
"""


def new(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=f"{', '.join(shipped_apps())}.")],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Folder, which names the app. Default: my-METHOD."),
    ] = None,
) -> None:
    """Create an app from a method, which runs unchanged, with one module for your model and data."""
    from hedgerow.wire.checks import did_you_mean

    with bad_options():
        apps = shipped_apps()
        known = shipped_app(method)
        if known is None:
            meant = did_you_mean(method, apps)
            raise ValueError(
                f"METHOD must be one of {', '.join(apps)}, got {method!r}{f' ({meant})' if meant else ''}"
            )
        method = known
        # Not METHOD, which would shadow the suite's app of that name.
        folder = folder or Path(f"my-{method}")
        home = folder.expanduser().absolute()
        if not _NAME.fullmatch(home.name):
            raise ValueError(
                f"FOLDER must be a letter, then up to 31 letters, digits and hyphens, got {home.name!r}"
            )
        if home.exists() and (not home.is_dir() or any(home.iterdir())):
            raise ValueError(f"FOLDER must be new or empty, got {home}")
        package = _write(method, apps[method], home)
    typer.echo(f"Put your model and data into {folder}/{package}/task.py. The app already runs:\n")
    typer.echo(f"    hedgerow run {folder}")


def _write(method: str, app: Path, home: Path) -> str:
    """Write the app and return its package's name."""
    from hedgerow.sim.runs.plan import toml_value

    package = method.replace("-", "_")
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(app / "LICENSE", home)
    shutil.copytree(app / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    own_task = app / "new" / "task.py"
    shutil.copy(own_task if own_task.is_file() else _TEMPLATE, home / package / "task.py")
    pyproject = _TABLE.sub("", (app / "pyproject.toml").read_text(encoding="utf-8"))
    description = descriptions()[method]
    own = {
        "name": home.name,
        "publisher": "me",
        "dataset": f"{package}.task:load",
        "model": f"{package}.task:build",
        **hedgerow_table(app).get("new", {}),
    }
    for key, value in own.items():
        pyproject = _set(pyproject, key, toml_value(value))
    pyproject = pyproject.replace(
        "# Small and quick; paper.toml is the paper's setting. `hedgerow settings` explains each key.\n",
        "# `hedgerow settings .` explains each key; dataset and model are in task.py.\n",
    )
    (home / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    # The run compares with the defaults of settings.py, so the copy's must be those of its pyproject.toml.
    config = tomllib.loads(pyproject)["tool"]["flwr"]["app"]["config"]
    settings = home / package / "settings.py"
    defaults = {key: own[key] for key in own if key in config}
    settings.write_text(_with_defaults(settings.read_text(encoding="utf-8"), defaults), encoding="utf-8")
    readme = _README.format(name=home.name, description=description, method=method, package=package)
    (home / "README.md").write_text(readme, encoding="utf-8")
    (home / ".gitignore").write_text(_IGNORED, encoding="utf-8")
    return package


def _set(pyproject: str, key: str, value: str) -> str:
    """Return the TOML with a key's value replaced; the key must occur once."""
    out, count = re.subn(
        rf"^{re.escape(key)} = .*$", lambda _: f"{key} = {value}", pyproject, flags=re.MULTILINE
    )
    if count != 1:
        raise RuntimeError(f"one line of the app's pyproject.toml must set {key}, got {count}")
    return out


def _with_defaults(source: str, defaults: Mapping[str, UserConfigValue]) -> str:
    """Return a settings.py whose class ``Settings`` has other defaults by key."""
    (model,) = (
        one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "Settings"
    )
    calls = {
        one.target.id: one.value
        for one in model.body
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(one.value, ast.Call)
    }
    lines = source.encode().splitlines(keepends=True)  # bytes: ast counts columns in them
    inherited = []
    for key, value in defaults.items():
        name, text = key.replace("-", "_"), _literal(value)
        if name not in calls:
            inherited.append(f"    {name}: {type(value).__name__} = setting({text})\n".encode())
            continue
        old = calls[name].args[0]  # a constant, hence on one line
        line = lines[old.lineno - 1]
        lines[old.lineno - 1] = line[: old.col_offset] + text.encode() + line[old.end_col_offset :]
    first = min(call.lineno for call in calls.values()) - 1
    return b"".join([*lines[:first], *inherited, *lines[first:]]).decode()


def _literal(value: UserConfigValue) -> str:
    from hedgerow.sim.runs.plan import toml_value

    return toml_value(value) if isinstance(value, str) else repr(value)
