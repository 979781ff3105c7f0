"""A ``flwr-serverapp`` that records the run of another project's app, as ``hedgerow run`` does.

The app needs no change: Flower's program runs with the same arguments, and when it calls the ServerApp the
run is watched (``hedgerow.sim.runs.foreign``). The suite's apps record themselves.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hedgerow.sim.deploy.warm import flower_program, path_with

if TYPE_CHECKING:
    from hedgerow.sim.runs.app import AppSpec

_COMMAND = "flwr-serverapp"
# The environment variable with the app's name, version and folder, and the parent of the run folder.
_VARIABLE = "HEDGEROW_RECORD"


def recorded_path(spec: AppSpec, output_dir: Path, home: Path) -> dict[str, str]:
    """Return the environment in which a SuperLink's runs of an app are recorded in ``output_dir``.

    A script is written into ``home``.
    """
    from hedgerow.sim.deploy.flower_cli import environment  # noqa: PLC0415
    from hedgerow.sim.runs.foreign import about_app  # noqa: PLC0415

    about, path = about_app(spec), environment(home)["PATH"]
    said = [about.name, about.version, str(spec.folder), str(output_dir)]
    return {_VARIABLE: json.dumps(said), **path_with(_COMMAND, "hedgerow.sim.deploy.recorded", home, path)}


def main() -> None:
    """Run Flower's program with ServerApps that are recorded."""
    from flwr.serverapp import ServerApp  # noqa: PLC0415

    call = ServerApp.__call__

    def recorded(app: ServerApp, grid: Any, context: Any) -> None:
        # Imported only here, where Flower renews the token, which a slow machine's imports outlast.
        from hedgerow.sim.runs.foreign import About, Records, show_run, watched_run  # noqa: PLC0415
        from hedgerow.sim.runs.serverapp import records_itself  # noqa: PLC0415

        if records_itself(app):
            call(app, grid, context)
            return
        name, version, folder, output_dir = json.loads(os.environ[_VARIABLE])
        done = watched_run(
            lambda watched: call(app, watched, context),
            grid,
            About(name, version, Path(folder)),
            context.run_config,
            Records(Path(output_dir)),
            seed=None,
        )
        show_run(done, name)

    ServerApp.__call__ = recorded  # type: ignore[assignment, method-assign]
    flower_program(_COMMAND)()


if __name__ == "__main__":
    main()
