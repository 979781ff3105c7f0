"""The wheel holds what the checkout holds."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("strategies", "clients", "wire", "tasks", "sim")


def test_the_wheel_holds_every_module_of_the_rooms_and_every_app(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for folder in (*ROOMS, "flower_apps"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.glob("[!.]*.*")):
        shutil.copy(file, source)
    shutil.copy(ROOT / "LICENSE", source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*command, "--wheel-dir", str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"hedgerow/{file.relative_to(ROOT)}" for room in ROOMS for file in (ROOT / room).rglob("*.py")}
    apps = {f"hedgerow/apps/{file.parent.name}/pyproject.toml" for file in ROOT.glob("flower_apps/*/*.toml")}
    assert modules | apps <= held
