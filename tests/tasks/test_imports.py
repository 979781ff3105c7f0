import pytest

from hedgerow.tasks import is_import_path
from hedgerow.tasks.imports import call_imported, import_callable


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
