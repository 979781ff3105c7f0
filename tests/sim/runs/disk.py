"""A disk that can be watched, stopped and lost: what ``durable`` does to it passes through here."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

# What changes a disk.
CHANGES = ("open", "write", "fsync", "replace", "unlink", "mkdir")


class Watched:
    """The module ``os`` with some functions in place of its own."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(os, name)


class KilledError(BaseException):
    """The process ended here."""


class Disk(Watched):
    """Stops after so many changes, and knows what of ``folder`` a power cut would leave.

    What a file held when it was synced is safe, and a folder's names are when the folder was synced.
    """

    def __init__(self, folder: Path, stop_after: int | None = None) -> None:
        super().__init__(**{name: self._counted(name) for name in CHANGES})
        self.folder, self.count, self.done = folder, 0, list[str]()
        self._stop_after = stop_after
        self._contents: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}

    def _counted(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._stop_after is not None and self.count >= self._stop_after:
                # Nothing that a dead process would do in passing on its error is done either.
                raise KilledError
            result = getattr(os, name)(*arguments, **options)
            self.count += 1
            self.done.append(name)
            if name == "fsync":
                self._synced(arguments[0])
            if self.count == self._stop_after:
                if name == "open":
                    os.close(result)
                raise KilledError
            return result

        return call

    def _synced(self, descriptor: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if place.is_dir():
            self._names[place] = {entry.name: entry.stat().st_ino for entry in place.iterdir()}
        else:
            self._contents[place.stat().st_ino] = place.read_bytes()

    def after_a_power_cut(self, to: Path, *, names_too: bool) -> Path:
        """Make the folder that is there then: unsynced bytes are lost, unsynced names if ``names_too``."""
        for folder in (self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())):
            named = {entry.name: entry.stat().st_ino for entry in folder.iterdir()}
            if names_too:
                named = self._names.get(folder, {})
            place = to / folder.relative_to(self.folder)
            if folder != self.folder and names_too and folder.name not in self._names.get(folder.parent, {}):
                continue
            place.mkdir(parents=True)
            for name, inode in named.items():
                if not (folder / name).is_dir():
                    (place / name).write_bytes(self._contents.get(inode, b""))
        return to

    def after_a_kill(self, to: Path) -> Path:
        """Make the folder that is there after the process alone has ended."""
        shutil.copytree(self.folder, to)
        return to
