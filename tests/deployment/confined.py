"""Start a program within what a systemd unit allows it: system calls, address families, privileges.

python confined.py UNIT PROGRAM [ARGUMENT ...]
"""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from errno import EAFNOSUPPORT, EPERM
from pathlib import Path

_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EQUAL = 4
_NO_NEW_PRIVS = 38
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def settings(unit: Path, key: str) -> list[list[str]]:
    """Return the values of a key of a unit, line by line, in words."""
    lines = (line.partition("=") for line in unit.read_text(encoding="utf-8").splitlines())
    return [value.split() for name, _, value in lines if name == key]


def members(group: str) -> Iterator[str]:
    """Yield the system calls of a group of systemd's, of those that it contains too."""
    shown = subprocess.run(
        ["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True
    )
    for line in shown.stdout.splitlines()[1:]:
        name = line.strip()
        if name.startswith("@"):
            yield from members(name)
        elif name and not name.startswith("#"):
            yield name


def allowed(unit: Path) -> set[str]:
    """Return the system calls that a unit allows: each line adds, or takes away where it begins with ~."""
    names: set[str] = set()
    for words in settings(unit, "SystemCallFilter"):
        found = {name for word in words for name in members(word.removeprefix("~"))}
        names = names - found if words[0].startswith("~") else names | found
    return names


def confine(unit: Path) -> None:
    """Let this process and all that it starts do no more than the unit allows."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | EPERM)))
    numbers = {name: library.seccomp_syscall_resolve_name(name.encode()) for name in allowed(unit)}
    for name, number in numbers.items():
        if number != -1 and name != "socket":
            library.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), number, 0)
    families = {_FAMILIES[name] for words in settings(unit, "RestrictAddressFamilies") for name in words}
    for family in range(46):
        action = _ALLOW if family in families else _ERRNO | EAFNOSUPPORT
        comparison = _Comparison(0, _EQUAL, family, 0)
        library.seccomp_rule_add_array(
            context, ctypes.c_uint32(action), numbers["socket"], 1, ctypes.byref(comparison)
        )
    ctypes.CDLL(None).prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if library.seccomp_load(context) != 0:
        raise OSError("the filter of system calls was not loaded")


if __name__ == "__main__":
    confine(Path(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
