"""Whose code raised an error: an app's, Flower's, Hedgerow's, or a library's that one of them called."""

from __future__ import annotations

import errno
import sysconfig
import traceback
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from hedgerow.sim.runs.app import AppSpec
from hedgerow.sim.runs.hooks import shipped_apps

_ROOT = Path(__file__).resolve().parents[2]
_ROOMS = [_ROOT / room for room in ("clients", "sim", "strategies", "tasks", "wire")]
_FLOWER = [Path(place).resolve() for place in getattr(find_spec("flwr"), "submodule_search_locations", [])]
_LIBRARIES = [Path(path).resolve() for path in sysconfig.get_paths().values()]
# Also a file that vanished from a run's folder.
_NO_ROOM = (errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Owner(StrEnum):
    """Whose a file is."""

    APP = "the app"
    FLOWER = "Flower"
    OURS = "Hedgerow"
    LIBRARY = "a library"


def _owner(file: str) -> Owner:
    path = Path(file).resolve()
    for owner, places in (
        (Owner.OURS, [*_ROOMS, *shipped_apps().values()]),
        (Owner.FLOWER, _FLOWER),
        (Owner.LIBRARY, _LIBRARIES),
    ):
        if any(place in path.parents for place in places):
            return owner
    return Owner.LIBRARY if file.startswith("<") else Owner.APP


def _frames(error: BaseException) -> list[tuple[Owner, traceback.FrameSummary]]:
    """Return the frames of an error with their owners, the innermost first."""
    return [(_owner(frame.filename), frame) for frame in reversed(traceback.extract_tb(error.__traceback__))]


def is_bug(error: BaseException) -> bool:
    """Return whether an error is Hedgerow's: its own assertion failed, or no other code called for it."""
    frames = [(owner, frame) for owner, frame in _frames(error) if owner != Owner.LIBRARY]
    innermost = frames[0][0] if frames else Owner.OURS
    if innermost == Owner.OURS and isinstance(error, AssertionError):
        return True
    return not any(owner == Owner.APP for owner, _ in frames) and innermost != Owner.FLOWER


def is_exit_of_others(error: SystemExit) -> bool:
    """Return whether an app's or a library's code ended the program, and no signal handler of ours."""
    owners = [owner for owner, _ in _frames(error)]
    return Owner.APP in owners and owners[0] != Owner.OURS


def blame(error: BaseException, spec: AppSpec) -> str:
    """Return who raised an error that is not Hedgerow's, and who called it."""
    frames = _frames(error)
    app = next((frame for owner, frame in frames if owner == Owner.APP), None)
    owner, innermost = frames[0]
    places = [] if owner == Owner.APP else [f"in {_named(owner, innermost)}"]
    if app is not None:
        called = "called from " if places else "in "
        places.append(f"{called}{Path(app.filename).name}, line {app.lineno}")
    file = spec.folder if app is None else Path(app.filename).resolve()
    name = f"the app {spec.name}" if spec.folder in (file, *file.parents) else file.name
    return f"{name} raised this, not Hedgerow, which ran it ({', '.join(places)})"


def _named(owner: Owner, frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    place = f"{path.name}, line {frame.lineno}"
    if owner != Owner.LIBRARY:
        return f"{owner}'s {place}"
    parts = path.parts
    package = parts[parts.index("site-packages") + 1] if "site-packages" in parts else path.stem
    return f"the library {package.removesuffix('.py')}"


def storage_failed(error: BaseException) -> bool:
    """Return whether a run's folder could not be written: the disk is full or broken, or a file is gone."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in _NO_ROOM
