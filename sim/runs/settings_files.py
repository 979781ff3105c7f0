"""What an app's files say of its settings, written from the settings themselves.

The ``[tool.flwr.app.config]`` of pyproject.toml holds every key with its default, and README.md a table of
them between two markers.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from flwr.app import UserConfigValue

from hedgerow.sim.runs.plan import toml_value
from hedgerow.sim.runs.settings import Setting

__all__ = ["listing", "pyproject_with", "readme_with", "write_settings"]

_CONFIG = re.compile(r"^\[tool\.flwr\.app\.config\]\n.*?(?=\n\[|(?<=\n)\n#|\Z)", re.MULTILINE | re.DOTALL)
_BEGIN = "<!-- The settings, from settings.py by `hedgerow settings APP --write`. -->"
_END = "<!-- End of the settings. -->"
_TABLE = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)


def listing(settings: Mapping[str, Setting]) -> str:
    """Return the settings for a terminal: each with its default, what it means and what is valid."""
    return "\n".join(
        f"{key} = {_toml(setting.default)}\n"
        f"    {setting.help.replace('`', '')}\n"
        f"    valid: {setting.kind.valid}"
        for key, setting in settings.items()
    )


def pyproject_with(settings: Mapping[str, Setting], pyproject: str) -> str:
    """Return the text of a pyproject.toml with the settings' defaults as the app's run config.

    Raises
    ------
    ValueError
        If it has no ``[tool.flwr.app.config]``.
    """
    lines = [f"{key} = {_toml(setting.default)}\n" for key, setting in settings.items()]
    return _replaced(
        _CONFIG, "[tool.flwr.app.config]\n" + "".join(lines), pyproject, "[tool.flwr.app.config]"
    )


def readme_with(settings: Mapping[str, Setting], readme: str) -> str:
    """Return the text of a README.md with the table of the settings between its markers.

    Raises
    ------
    ValueError
        If it has not both markers.
    """
    rows = [
        # In markdown what stands between < and > would be a tag.
        (key, _cell(setting.default), setting.kind.valid.replace("<", "&lt;"), setting.help)
        for key, setting in settings.items()
    ]
    lines = "".join(f"| `{key}` | {default} | {valid} | {what} |\n" for key, default, valid, what in rows)
    table = f"{_BEGIN}\n\n| key | default | valid | what |\n|---|---|---|---|\n{lines}\n{_END}"
    return _replaced(_TABLE, table, readme, _BEGIN)


def write_settings(settings: Mapping[str, Setting], folder: Path) -> list[Path]:
    """Bring an app's pyproject.toml and README.md up to date; return the files that changed.

    Raises
    ------
    OSError
        If one is not there.
    ValueError
        If one has no place for the settings; then neither is written.
    """
    texts = {}
    for name, written in (("pyproject.toml", pyproject_with), ("README.md", readme_with)):
        before = (folder / name).read_text(encoding="utf-8")
        after = written(settings, before)
        if after != before:
            texts[folder / name] = after
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _replaced(place: re.Pattern[str], by: str, text: str, what: str) -> str:
    if not place.search(text):
        raise ValueError(f"no place for the settings; valid is a file with {what}")
    return place.sub(lambda _: by, text, count=1)


def _toml(value: UserConfigValue) -> str:
    # Python's 1e-05 is people's 1e-5.
    return toml_value(value).replace("e-0", "e-") if isinstance(value, float) else toml_value(value)


def _cell(value: UserConfigValue) -> str:
    return (f"`{value}`" if value else "") if isinstance(value, str) else _toml(value)
