"""Separate users for SuperNodes on one machine, so that no node can read another's files.

If the launcher is root on Linux, each node runs under a user id without an account, with copies of its files
that only this id may read. Otherwise all nodes run as the launcher's user, and file modes protect only
against other users.
"""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

# The range that systemd reserves for services without an account.
_FIRST, _LAST = 61184, 65519


class NoUsersError(RuntimeError):
    """Nodes cannot run as separate users here, for the reason in the message."""


class NodeUsers:
    """``count`` unused user ids without an account, reserved until ``close``.

    Attributes
    ----------
    ids : list of int
        The user ids, which are also the group ids.

    Raises
    ------
    NoUsersError
        If this process may not start programs as another user, if such a user cannot run this environment's
        Python, or if there are not enough ids.
    """

    def __init__(self, count: int) -> None:
        if sys.platform != "linux" or os.geteuid() != 0:
            raise NoUsersError("only root on Linux may start programs as other users")
        self.ids: list[int] = []
        self._held = ExitStack()
        try:
            self._reserve(count)
            self._probe(self.ids[0])
        except BaseException:
            self.close()
            raise

    def _reserve(self, count: int) -> None:
        taken = {one.pw_uid for one in pwd.getpwall()} | {one.gr_gid for one in grp.getgrall()}
        taken |= {one.info["uids"].effective for one in psutil.process_iter(["uids"]) if one.info["uids"]}
        for uid in range(_FIRST, _LAST + 1):
            if len(self.ids) == count:
                return
            # The kernel releases the name when this process ends, in any way.
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0hedgerow-node-user-{uid}")
            except OSError:
                claim.close()
                continue
            self._held.enter_context(claim)
            if uid not in taken:
                self.ids.append(uid)
        if len(self.ids) < count:
            raise NoUsersError(
                f"{count} user ids are needed; from {_FIRST} to {_LAST} only {len(self.ids)} are free"
            )

    def _probe(self, uid: int) -> None:
        command = [sys.executable, "-c", "import flwr.app, hedgerow.wire"]
        try:
            shown = subprocess.run(
                command, user=uid, group=uid, extra_groups=[], cwd="/", env={},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        except OSError as error:
            raise NoUsersError(f"other users cannot run {sys.executable} ({error.strerror})") from error
        if shown.returncode:
            last = (shown.stderr.strip().splitlines() or ["no message"])[-1]
            raise NoUsersError(f"other users cannot use {sys.executable} ({last})")

    def close(self) -> None:
        """Release the ids."""
        self._held.close()


def give(path: Path, uid: int) -> None:
    """Give a file or folder to a user, read-only and unreadable for others."""
    folder = path.is_dir() and not path.is_symlink()
    for inner in path.iterdir() if folder else ():
        give(inner, uid)
    os.chown(path, uid, uid, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if folder else 0))


def own_folder(path: Path, uid: int) -> None:
    """Create a folder that only a user may enter."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    os.chown(path, uid, uid)


def own_copy(source: Path, target: Path, uid: int) -> Path:
    """Copy a file or folder for a user, unreadable for others, and return the copy's path."""
    target.parent.mkdir(mode=0o700, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        # Created with its mode, so that nobody can read the copy while it is written.
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        shutil.copyfile(source, target)
    give(target, uid)
    os.chown(target.parent, uid, uid)
    return target
