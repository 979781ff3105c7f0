import sys
from pathlib import Path

import pytest

from hedgerow.tasks import is_import_path
from hedgerow.tasks.imports import call_imported, import_callable
from hedgerow.tasks.permissions import Permissions, permitted


def test_module_and_function_joined_by_a_colon_is_an_import_path_and_names_the_function():
    import os.path

    assert all(map(is_import_path, ["module:function", "package.module:function", "_a.b_1:C"]))
    others = ["mnist-5k", "module", "module:", ":f", "a:b:c", "a b:c", "a..b:c", "1a:b"]
    assert not any(map(is_import_path, others))
    assert import_callable("dataset", "os.path:join") is os.path.join


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module_xyz:f", "cannot import"),
        ("os.path:nix", "has no function"),
        ("os:sep", "no function"),
    ],
)
def test_an_import_path_that_leads_nowhere_names_key_value_and_reason(path, reason):
    with pytest.raises(ValueError, match=rf"dataset = '{path}'.*{reason}"):
        import_callable("dataset", path)


def test_a_function_that_cannot_take_what_it_is_given_is_shown_with_its_signature(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> None: ...

    monkeypatch.setattr("math.none", none, raising=False)
    with pytest.raises(ValueError, match=r"model = 'math:none' must take 2 arguments, got none\(\) -> None$"):
        call_imported("model", "math:none", 1, 2)
    assert call_imported("model", "math:hypot", 3.0, 4.0) == 5.0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("raise OSError(28, 'No space left on device', '/scratch/x')", "No space left on device"),
        ("open('/nowhere/at/all')", "No such file or directory: '/nowhere/at/all'"),
        ("numpy.zeros(3).reshape(2)", "cannot reshape array"),
        ("import json; json.loads('{')", "Expecting property name"),
        ("raise PermissionError(13, 'Permission denied')", "Permission denied"),
        ("return 1 / 0", r"raised ZeroDivisionError"),
        ("sys.exit(0)", r"raised SystemExit\(0\)"),
        ("raise Exception", r"raised Exception\(\)"),
    ],
)
def test_any_error_of_a_function_names_key_value_file_and_line(
    line: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "failing_module.py"
    file.write_text(f"import sys\nimport numpy\n\ndef load():\n    {line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_module", raising=False)
    with pytest.raises(
        ValueError, match=rf"^dataset = 'failing_module:load': .*{words}.*failing_module.py, line 5"
    ):
        call_imported("dataset", "failing_module:load")


def test_a_module_that_ends_the_program_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ending_module.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"cannot import 'ending_module' \(SystemExit\(0\)\)"):
        call_imported("model", "ending_module:load")


def test_what_the_owner_forbids_is_no_error_of_the_function() -> None:
    def forbid(key: str, path: object) -> None:
        raise PermissionError("not allowed")

    with permitted(Permissions(forbid, forbid)), pytest.raises(PermissionError, match=r"^not allowed$"):
        call_imported("model", "math:hypot", 3.0, 4.0)
