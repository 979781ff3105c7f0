"""Paths of another system, which here would name one odd folder."""

import os
import re
from pathlib import Path

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


def foreign_path(path: str) -> str:
    """Return why a path is one of Windows and not of this system; empty if it is not, or exists here.

    Examples
    --------
    >>> foreign_path("runs/today")
    ''
    """
    if os.name == "nt" or not (_DRIVE.match(path) or "\\" in path) or Path(path).exists():
        return ""
    return "paths on this system have / between folders, and no drive"
