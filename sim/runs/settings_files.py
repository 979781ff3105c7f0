"""An app's settings as text: for a terminal, as tables of a page, and in its pyproject.toml.

The ``[tool.flwr.app.config]`` of pyproject.toml has every key with its default.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from flwr.app import UserConfigValue

from hedgerow.sim.runs.plan import toml_value
from hedgerow.sim.runs.settings import GROUPS, Setting

_CONFIG = re.compile(r"^\[tool\.flwr\.app\.config\]\n.*?(?=\n\[|(?<=\n)\n#|\Z)", re.MULTILINE | re.DOTALL)


def listing(settings: Mapping[str, Setting]) -> str:
    """Return the settings as text: the most important ones, then the others by group."""
    sections = {"Those that matter first": {key: one for key, one in settings.items() if one.first}}
    for group, members in _groups(settings).items():
        sections[group.capitalize()] = {key: one for key, one in members.items() if not one.first}
    return "\n\n".join(
        "\n".join(
            [
                f"# {title}",
                *(_entry(key, one, one.default, f"valid: {one.kind.valid}") for key, one in some.items()),
            ]
        )
        for title, some in sections.items()
        if some
    )


def changed(settings: Mapping[str, Setting], run_config: Mapping[str, UserConfigValue]) -> str:
    """Return the settings of a run that differ from the defaults, as text."""
    return "\n".join(
        [
            *(
                _entry(key, one, run_config[key], f"default: {_toml(one.default)}")
                for key, one in settings.items()
                if run_config.get(key, one.default) != one.default
            ),
            *(
                f"{key} = {_toml(value)}\n    not a setting of the app"
                for key, value in run_config.items()
                if key not in settings
            ),
        ]
    )


def _entry(key: str, setting: Setting, value: UserConfigValue, more: str) -> str:
    return f"{key} = {_toml(value)}\n    {setting.help.replace('`', '')}\n    {more}"


def _groups(settings: Mapping[str, Setting]) -> dict[str, dict[str, Setting]]:
    """Return the settings by group, in the order of ``GROUPS``."""
    found = {group: {key: one for key, one in settings.items() if one.group == group} for group in GROUPS}
    return {group: members for group, members in found.items() if members}


def pyproject_with(settings: Mapping[str, Setting], pyproject: str) -> str:
    """Return a pyproject.toml with the defaults in ``[tool.flwr.app.config]``; ValueError if it has none."""
    lines = [f"{key} = {_toml(setting.default)}\n" for key, setting in settings.items()]
    text, found = _CONFIG.subn(lambda _: "[tool.flwr.app.config]\n" + "".join(lines), pyproject, count=1)
    if not found:
        raise ValueError("the file must have a place for the settings, [tool.flwr.app.config]")
    return text


def tables(settings: Mapping[str, Setting]) -> str:
    """Return a table of the settings for each group, in Markdown."""
    return "\n".join(
        f"## {group.capitalize()}\n\n| key | default | valid | what |\n|---|---|---|---|\n"
        # In markdown, text between < and > would be a tag.
        + "".join(
            f"| `{key}` | {_cell(one.default)} | {one.kind.valid.replace('<', '&lt;')} | {one.help} |\n"
            for key, one in members.items()
        )
        for group, members in _groups(settings).items()
    )


def write_settings(settings: Mapping[str, Setting], folder: Path) -> list[Path]:
    """Update an app's pyproject.toml; return it if it changed.

    Raises OSError if it is missing, ValueError if it lacks a place for the settings.
    """
    path = folder / "pyproject.toml"
    before = path.read_text(encoding="utf-8")
    after = pyproject_with(settings, before)
    if after == before:
        return []
    path.write_text(after, encoding="utf-8")
    return [path]


def _toml(value: UserConfigValue) -> str:
    # 1e-5 instead of Python's 1e-05.
    return toml_value(value).replace("e-0", "e-") if isinstance(value, float) else toml_value(value)


def _cell(value: UserConfigValue) -> str:
    return (f"`{value}`" if value else "") if isinstance(value, str) else _toml(value)
