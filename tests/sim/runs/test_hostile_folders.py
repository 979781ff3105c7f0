"""Whatever stands in place of a file of a run's folder: each reader ends soon, with a result or one error."""

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from tests.flower_apps.cases import SIMILARITY_FREE
from tests.sim.cli.command_line import hedgerow

from hedgerow.sim import load_model, plan_run, read_model, run_app
from hedgerow.sim.runs.folder import RunFolderError, read_json
from hedgerow.sim.runs.follow import FollowedRun, check_followed

# A reader that waits for a pipe, or reads a device without end, is stopped after so many seconds and bytes.
SECONDS, BYTES = 30, 6 << 30
APP = SIMILARITY_FREE.spec.folder
LATEST = "checkpoint/latest.safetensors"


@contextmanager
def limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"not ended after {SECONDS} s")

    before, limits = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def huge(file: Path) -> None:
    """Ten gigabytes that occupy nothing, after the first half of what was there."""
    cut(file)
    os.truncate(file, 10 << 30)


def in_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def spoil(file: Path) -> None:
        file.unlink()
        make(file)

    return spoil


DAMAGES = {
    "a pipe": in_place(os.mkfifo),
    "a device": in_place(lambda file: file.symlink_to("/dev/zero")),
    "a link": lambda file: file.symlink_to(file.rename(file.with_name("." + file.name))),
    "a folder": in_place(Path.mkdir),
    "cut": cut,
    "huge": huge,
}


def told(run: Path, *command: object) -> str:
    """Return a command's one error; empty if it had a result."""
    shown = hedgerow(*command)
    assert shown.exit_code in (0, 2), shown.output
    assert isinstance(shown.exception, SystemExit | None), shown.exception
    return shown.stderr if shown.exit_code else ""


def watched(run: Path) -> str:
    try:
        page = FollowedRun(check_followed(run)).page()
    except ValueError as error:
        return str(error)
    return page if "cannot be shown" in page else ""


def loaded(run: Path) -> str:
    try:
        load_model(run)
    except ValueError as error:
        return str(error)
    return ""


READERS: dict[str, Callable[[Path], str]] = {
    "resume": lambda run: told(run, "run", APP, "--resume", run, "--quiet"),
    "report": lambda run: told(run, "report", run, "--out", run.parent / "report.html"),
    "table": lambda run: told(run, "table", run),
    "export": lambda run: told(run, "export", run, "--csv", run.parent / "run.csv"),
    "watch": watched,
    "load_model": loaded,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has every file a run can leave, and a round less than it was asked for."""
    parent = tmp_path_factory.mktemp("whole")
    asked = {**SIMILARITY_FREE.small, "quiet": True, "checkpoint-every": 1}
    plan = plan_run(
        SIMILARITY_FREE.spec, [*(f"{k}={json.dumps(v)}" for k, v in asked.items()), f"output-dir='{parent}'"]
    )
    run_app(SIMILARITY_FREE.loaded, plan)
    (folder,) = parent.iterdir()
    return folder


def files(run: Path) -> list[Path]:
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


def check_reader(reader: str, damage: str, whole: Path, parent: Path) -> None:
    named = set()
    for number, file in enumerate(files(whole)):
        run = parent / str(number) / "run"
        shutil.copytree(whole, run)
        DAMAGES[damage](run / file)
        with limited():
            error = READERS[reader](run)
        assert error.count("Error") <= 1, error
        if error:
            named.add(str(file))
            # The page of a run that waits for its first round has the reason.
            assert file.name in error or (reader, file.name) == ("watch", "rounds.jsonl"), error
    assert named, "no file was read"
    if reader == "resume":
        assert LATEST not in named, "the previous checkpoint was not used"


every_reader = pytest.mark.parametrize("reader", READERS)


@every_reader
def test_a_reader_of_pipes_ends_with_a_result_or_one_error(reader: str, whole: Path, tmp_path: Path) -> None:
    check_reader(reader, "a pipe", whole, tmp_path)


@pytest.mark.slow
@every_reader
@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"a pipe"}))
def test_a_reader_of_any_damage_ends_with_a_result_or_one_error(
    reader: str, damage: str, whole: Path, tmp_path: Path
) -> None:
    check_reader(reader, damage, whole, tmp_path)


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"cut"}))
def test_only_a_regular_file_of_a_sane_size_is_read(damage: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    assert read_json(file) == {}
    DAMAGES[damage](file)
    with limited(), pytest.raises(RunFolderError, match=rf"^{file}: must (be a regular file|have at most)"):
        read_json(file)


def test_a_model_may_be_named_by_a_link_and_a_folder_holds_none(whole: Path, tmp_path: Path) -> None:
    """Caches of models name files by links."""
    link = tmp_path / "model.safetensors"
    link.symlink_to(whole / "model.safetensors")
    assert read_model(link).keys() == read_model(whole).keys()
    with pytest.raises(RunFolderError, match="must be a regular file, got a link"):
        read_model(tmp_path)
