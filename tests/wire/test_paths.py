"""Which paths are of another system."""

from pathlib import Path

import pytest

from hedgerow.wire.paths import foreign_path

WINDOWS = ["C:\\Users\\me\\runs", "c:/runs", "runs\\today", "\\\\server\\share", "D:\\"]
OURS = ["runs", "/tmp/runs", "~/runs", "a:b", "runs 2024", "x/C:"]


@pytest.mark.parametrize("path", WINDOWS)
def test_a_path_of_windows_is_of_another_system(path: str) -> None:
    assert foreign_path(path)


@pytest.mark.parametrize("path", OURS)
def test_a_path_of_this_system_is_taken(path: str) -> None:
    assert foreign_path(path) == ""


def test_a_folder_that_exists_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a\\b").mkdir()
    assert foreign_path(str(tmp_path / "a\\b")) == ""
