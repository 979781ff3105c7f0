"""The wheel's packages: every folder of the rooms, and the apps as files. The rest is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

ROOMS = ("strategies", "clients", "wire", "tasks", "sim")
FOLDERS = sorted({file.parent for room in ROOMS for file in Path(room).rglob("*.py")})

setup(packages=["hedgerow", "hedgerow.apps", *(".".join(("hedgerow", *folder.parts)) for folder in FOLDERS)])
