"""``hedgerow new``: one of the suite's apps as a folder of one's own, with a place for model and data."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from hedgerow.sim.cli.options import bad_options

__all__ = ["new"]

_TEMPLATES = Path(__file__).parent / "templates"
# Flower's rule for the name of an app and of its folder.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
# What differs between methods: the module of model and data, and settings that suit its example.
_TASKS = {"ceps": "sparse_task.py", "hsgd": "vertical_task.py"}
_SETTINGS: dict[str, dict[str, str]] = {
    # The paper's rule for sigma is for its own problems; with it this one diverges. There are twice as many
    # signs as the model has entries.
    "ceps": {
        "problem": '"network"',
        "num-clients": "8",
        "sparsity": "100",
        "measurements": "1300",
        "sigma-rule": '"fixed_c"',
        "mu": "0.3",
        "interval-low": "3",
        "interval-high": "5",
    },
    "fedmud": {"num-rounds": "60"},
    "similarity-free": {"partition": '"dirichlet(0.5)"'},
}
_SIZES = {"ceps": 8}

_README = """# {name}

{description} — an app of your own, made by `hedgerow new {method}`.

1. Put your model and your data into [`{package}/task.py`]({package}/task.py), in place of the example there.
2. Set what you want in `pyproject.toml` under `[tool.flwr.app.config]`. `hedgerow settings .` says of each
   key what it means and what is valid.
3. Run it, here in the folder:

```bash
hedgerow run .                        # in this process, without Ray
hedgerow run . -c "{example}"         # with other settings
hedgerow run . --engine flower        # on Flower's simulation
hedgerow deploy local .               # on SuperNodes on this machine
flwr build                            # as a Flower App Bundle
```

`{package}/server_app.py` says what is trained by which strategy, `{package}/client_app.py` what a node does,
`{package}/settings.py` which keys there are. All three are yours to change.
"""


def new(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="sd-feel, similarity-free, fedmud, ceps or hsgd.")
    ],
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Where; its name is the app's. Default: my-METHOD."),
    ] = None,
) -> None:
    """Write an app of a method that runs as it is, with one module for your model and your data."""
    from hedgerow.sim.runs.shipped import shipped_app, shipped_apps
    from hedgerow.wire.checks import did_you_mean

    with bad_options():
        apps = shipped_apps()
        known = shipped_app(method)
        if known is None:
            meant = did_you_mean(method, apps)
            raise ValueError(f"METHOD {method!r}; valid is {', '.join(apps)}{f' ({meant})' if meant else ''}")
        method = known
        # Not METHOD, which would hide the suite's own app of that name.
        folder = folder or Path(f"my-{method}")
        home = folder.expanduser().absolute()
        if not _NAME.fullmatch(home.name):
            raise ValueError(
                f"FOLDER {home.name!r}; Flower takes a letter, then up to 31 letters, digits and hyphens"
            )
        if home.exists() and (not home.is_dir() or any(home.iterdir())):
            raise ValueError(f"FOLDER {home}: there is something already; valid is a new or an empty folder")
        package = _write(method, apps[method], home)
    typer.echo(f"{folder}/{package}/task.py is where your model and your data go. It runs as it is:\n")
    typer.echo(f"    hedgerow run {folder}")


def _write(method: str, app: Path, home: Path) -> str:
    """Write the app and return its package's name."""
    package = method.replace("-", "_")
    home.mkdir(parents=True, exist_ok=True)
    shutil.copy(app / "LICENSE", home)
    shutil.copytree(app / package, home / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_TEMPLATES / _TASKS.get(method, "task.py"), home / package / "task.py")
    pyproject = (app / "pyproject.toml").read_text(encoding="utf-8")
    description = re.findall(r'^description = "(.*)"$', pyproject, re.MULTILINE)[0]
    own = {
        "dataset": f'"{package}.task:load"',
        "model": f'"{package}.task:build"',
        **_SETTINGS.get(method, {}),
    }
    for key, value in {"name": f'"{home.name}"', "publisher": '"me"', **own}.items():
        pyproject = _set(pyproject, key, value)
    if method in _SIZES:
        pyproject = _set(pyproject, "num-supernodes", str(_SIZES[method]))
    pyproject = pyproject.replace(
        "# Small and quick; paper.toml is the paper's setting. Every key is described in README.md.\n",
        "# `hedgerow settings .` says what each key means; dataset and model are yours, in task.py.\n",
    )
    (home / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    example = "seed=1 learning-rate=0.1" if method != "similarity-free" else "seed=1 fixed-c=0.5"
    readme = _README.format(
        name=home.name, description=description, method=method, package=package, example=example
    )
    (home / "README.md").write_text(readme, encoding="utf-8")
    return package


def _set(pyproject: str, key: str, value: str) -> str:
    """Return the TOML with the value of a key, which stands in it once."""
    out, count = re.subn(
        rf"^{re.escape(key)} = .*$", lambda _: f"{key} = {value}", pyproject, flags=re.MULTILINE
    )
    if count != 1:
        raise RuntimeError(f"{count} lines of the app's pyproject.toml set {key}; there must be one")
    return out
