"""An app is read from its folder, and its components are what its pyproject.toml says."""

import sys
from pathlib import Path

import pytest
from tests.sim.tiny_app import MakeApp

from hedgerow.sim import find_app, load_app
from hedgerow.sim.runs.app import settings_module


def test_an_app_is_found_by_folder(make_app: MakeApp) -> None:
    home = make_app()
    spec = find_app(home)
    assert (spec.name, spec.folder) == ("tiny-app", home)
    assert spec.config["model.width"] == 3
    assert spec.components["clientapp"] == "tinyapp.client_app:app"


def test_an_app_is_found_by_module(make_app: MakeApp) -> None:
    home = make_app()
    sys.path.insert(0, str(home))
    assert find_app("tinyapp").folder == home
    assert find_app("tinyapp.server_app").folder == home


def test_what_is_no_app_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="or an importable module, got"):
        find_app(tmp_path / "nowhere")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    with pytest.raises(ValueError, match=r"Missing \[tool.flwr.app\]"):
        find_app(tmp_path)


def test_a_component_of_the_wrong_kind_is_refused(make_app: MakeApp) -> None:
    home = make_app()
    pyproject = home / "pyproject.toml"
    text = pyproject.read_text()
    pyproject.write_text(text.replace("tinyapp.client_app:app", "tinyapp.server_app:app"))
    with pytest.raises(ValueError, match="must be a ClientApp, got a ServerApp"):
        load_app(home)
    pyproject.write_text(text.replace("tinyapp.client_app:app", "tinyapp.client_app:nothing"))
    with pytest.raises(ValueError, match="must be a ClientApp, got a NoneType"):
        load_app(home)


def test_two_apps_with_one_package_name_are_not_mixed_up(make_app: MakeApp) -> None:
    load_app(make_app(folder="first"))
    second = make_app(folder="second")
    with pytest.raises(ValueError, match=r"already imported from .*first"):
        load_app(second)


def test_the_apps_own_size_is_read_from_its_pyproject(make_app: MakeApp) -> None:
    assert find_app(make_app(extra="[tool.hedgerow]\nnum-supernodes = 4")).num_supernodes == 4
    with pytest.raises(ValueError, match="num-supernodes must be an integer >= 1, got 0"):
        find_app(make_app(folder="bad", extra="[tool.hedgerow]\nnum-supernodes = 0"))


def test_an_app_without_settings_is_named(make_app: MakeApp) -> None:
    home = make_app()
    with pytest.raises(ValueError, match=r"app 'tiny-app' has no module tinyapp\.settings"):
        settings_module(find_app(home))
    (home / "tinyapp" / "settings.py").write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        settings_module(find_app(home))
    (home / "tinyapp" / "settings.py").write_text("")
    with pytest.raises(ValueError, match=r"tinyapp\.settings of app 'tiny-app' has no SETTINGS"):
        settings_module(find_app(home))
