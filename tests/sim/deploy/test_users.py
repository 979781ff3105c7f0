"""Users that nodes can be, and what becomes theirs alone."""

import os
from pathlib import Path

import pytest

from hedgerow.sim.deploy.processes import Program
from hedgerow.sim.deploy.users import NodeUsers, NoUsersError, own_copy, own_folder

root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files and start programs as others")


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether other users can run this Python is the machine's matter."""
    monkeypatch.setattr(NodeUsers, "_probe", lambda self, uid: None)


def test_who_is_not_root_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoUsersError, match="only root on Linux"):
        NodeUsers(2)


@root
def test_ids_are_nobody_elses_and_given_back(reachable: None) -> None:
    first, second = NodeUsers(3), NodeUsers(3)
    assert not set(first.ids) & set(second.ids)
    first.close()
    third = NodeUsers(3)
    assert third.ids == first.ids
    second.close()
    third.close()


@root
def test_a_copy_is_its_users_alone_and_the_original_stays(tmp_path: Path) -> None:
    source = tmp_path / "images"
    (source / "well").mkdir(parents=True)
    original = source / "well" / "a.png"
    original.write_bytes(b"a")
    before = (original.stat().st_uid, original.stat().st_mode)
    # A home that was made for all to see is closed.
    (tmp_path / "home").mkdir(mode=0o755)
    own_folder(tmp_path / "home", 61184)
    copy = own_copy(source, tmp_path / "home" / "files" / "data", 61184)
    found = {str(path.relative_to(copy.parent)): path.stat() for path in [copy, *copy.rglob("*")]}
    assert {path: (status.st_uid, oct(status.st_mode & 0o777)) for path, status in found.items()} == {
        "data": (61184, "0o500"), "data/well": (61184, "0o500"), "data/well/a.png": (61184, "0o400"),
    }  # fmt: skip
    assert (copy / "well" / "a.png").read_bytes() == b"a"
    assert (original.stat().st_uid, original.stat().st_mode) == before


@root
def test_a_program_runs_as_its_user_with_no_other_groups(tmp_path: Path) -> None:
    one = Program("id", ["/bin/sh", "-c", "id -u; id -G; pwd"], {}, tmp_path / "log", user=61184)
    one.start()
    assert one._process is not None
    one._process.wait(10)
    assert one.log().split() == ["61184", "61184", "/"]
