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
    for folder in (*ROOMS, "api", "flower_apps"):
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
    assert modules | apps | {"hedgerow/__init__.py"} <= held
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "installed")
    _check_import(tmp_path / "installed", tmp_path)


def test_what_users_of_a_package_try_first_works_and_is_light() -> None:
    _check_import(None, Path("/"))


def _check_import(installed: Path | None, folder: Path) -> None:
    first = f"sys.path.insert(0, {str(installed)!r})" if installed else ""
    code = f"""import sys; {first}
sys.meta_path[:] = [one for one in sys.meta_path if {not installed} or "editable" not in repr(one)]
import hedgerow
assert not {{"torch", "flwr", "numpy"}} & set(sys.modules)
from importlib.metadata import version
assert hedgerow.__version__ == version("hedgerow")
assert {{"simulate", "strategies"}} <= set(dir(hedgerow))
assert not hasattr(hedgerow, "nonsense")
assert hedgerow.simulate is hedgerow.sim.simulate
import hedgerow.wire
assert hedgerow.strategies.SDFeel
assert {not installed} or hedgerow.sim.__file__.startswith({str(installed)!r})
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, check=False, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
