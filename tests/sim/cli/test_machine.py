"""What a machine lacks, and paths of another system, are one error each, and no odd folder."""

import errno
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from tests.sim.cli.command_line import SD_FEEL, hedgerow
from typer.main import get_command

from hedgerow.sim.cli import app
from hedgerow.sim.cli.mistakes import BUG
from hedgerow.sim.runs.folder import RunFolderError, new_run_folder


def raising(error: BaseException) -> Any:
    def raised(*_: object, **__: object) -> None:
        raise error

    return raised


def wrapped(error: OSError) -> RuntimeError:
    try:
        raise RuntimeError("while it imported torch") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize("around", [lambda error: error, wrapped], ids=["itself", "as a cause"])
@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "set TMPDIR to one",
        ),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n"),
        (ImportError("libc10.so: cannot open shared object file: Too many open files"), "ulimit -n"),
    ],
)
def test_what_the_machine_lacks_is_no_bug(
    error: Exception, remedy: str, around: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hedgerow.sim.runs.launch.run_app", raising(around(error)))
    monkeypatch.setattr("hedgerow.sim.runs.app.load_app", lambda _: None)
    shown = hedgerow("run", SD_FEEL)
    assert remedy in shown.output
    assert BUG not in shown.output
    assert "Traceback" not in shown.output
    assert shown.exit_code in (1, 2)


def test_a_machine_without_a_writable_temporary_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    monkeypatch.setattr("hedgerow.sim.runs.launch.run_app", lambda *_, **__: tempfile.gettempdir())
    shown = hedgerow("run", SD_FEEL)
    assert "no writable folder for temporary files: set TMPDIR to one" in shown.output
    assert "Traceback" not in shown.output


WINDOWS = ["C:\\Users\\me\\runs", "c:/runs", "runs\\today", "\\\\server\\share", "D:\\"]


@pytest.mark.parametrize("path", WINDOWS)
def test_a_path_of_windows_makes_no_folder(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [
        hedgerow("run", SD_FEEL, "--output-dir", path),
        hedgerow("deploy", "keys", path, "--nodes", 1),
        hedgerow("deploy", "split", "mnist-5k", path, "--nodes", 2),
        hedgerow("deploy", "local", SD_FEEL, "--out", path),
        hedgerow("new", "sd-feel", path),
    ]
    for one in shown:
        assert one.exit_code == 2, one.output
        assert "no drive" in one.output
    with pytest.raises(RunFolderError, match="no drive"):
        new_run_folder(path, "app")
    assert [*tmp_path.iterdir()] == []


def test_every_command_checks_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checked = 0
    for name, command in _commands(get_command(app)):
        for param in command.params:
            if not isinstance(param.type, click.Path):
                continue
            given = [param.opts[0], "C:\\x"] if param.param_type_name == "option" else ["C:\\x"]
            before = [
                "1" if isinstance(one.type, click.types.IntParamType) else "sd-feel"
                for i, one in enumerate(command.params)
                if one.param_type_name == "argument"
                and one is not param
                and (one.required or i < command.params.index(param))
            ]
            shown = hedgerow(*name, *before, *given)
            assert "no drive" in shown.output or "Missing option" in shown.output, (name, param.name)
            checked += "no drive" in shown.output
    assert checked >= 10


def _commands(group: Any, name: tuple[str, ...] = ()) -> Any:
    for key, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*name, key))
        else:
            yield (*name, key), command
