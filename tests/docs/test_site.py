"""What holds of the site without building it: `make site` builds it, strictly."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
import yaml
from results.redraw import count
from tests.flower_apps.cases import CASES, AppCase
from tests.registry import REGISTRY

from hedgerow.sim import find_app, plan_run
from hedgerow.sim.cli import app

from .pages import DOCS, METHODS, ROOT, blocks, commands, hook

APPS = sorted((ROOT / "flower_apps").glob("*/README.md"))
RESULTS = sorted((ROOT / "flower_apps").glob("*/RESULTS.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *APPS, *RESULTS]
# For Flower, and no page of the site.
PROPOSALS = DOCS / "proposals"
COMMANDS = typer.main.get_command(app)


class _Config(yaml.SafeLoader):
    """Reads mkdocs.yml without the functions that it names."""


_Config.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def test_the_navigation_has_every_page_and_no_other() -> None:
    site = hook()
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), _Config)
    named = list(site.pages_of(site.with_methods(config["nav"])))
    made = {*site.PAGES, *site.MADE, *site.ALGORITHMS, *site.NOTEBOOKS}
    assert all((ROOT / file).is_file() for file in site.PAGES.values())
    assert {f"{place}/{path.parent.name}.md" for path in APPS for place in ("apps", "settings")} <= made
    assert sorted(named) == sorted(
        made
        | {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if PROPOSALS not in path.parents}
    )


def test_each_extra_has_a_row_on_the_page_on_installing() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    rows = re.findall(r"^\| (`.*?`) \|", (DOCS / "start/install.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras - {
        "docs",
        "release",
        "dev",
    }


def test_each_error_among_the_frequent_questions_is_one_that_the_code_gives() -> None:
    files = (
        path
        for room in ("clients", "sim", "strategies", "tasks", "wire")
        for path in (ROOT / room).rglob("*.py")
    )
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in files))
    errors = re.findall(r"^### `(.*)`$", (DOCS / "start/faq.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(errors) >= 15
    for error in errors:
        words = [re.escape(part.strip("'[] ")) for part in error.split("…") if part.strip("'[] ")]
        assert re.search(r"[^\n]{0,80}?".join(words), code), error


def test_the_site_fetches_nothing() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    # Its script would come from unpkg.com.
    assert not [page.name for page in PAGES if "```mermaid" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("app_name", [one.app for one in REGISTRY if one.suite])
def test_each_equation_names_a_function_that_is_there(app_name: str) -> None:
    page = METHODS / f"{app_name}.md"
    section = page.read_text(encoding="utf-8").split("## The method in equations")[1].split("\n## ")[0]
    links = re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)\)", section)
    assert len(links) >= 5
    for name, target in links:
        file = (page.parent / target).resolve().relative_to(ROOT)
        outer, *inner = name.split(".")
        for one, indent in ((outer, ""), *((method, "    ") for method in inner)):
            assert re.search(rf"^{indent}(def|class) {one}\b", (ROOT / file).read_text(), re.MULTILINE), (
                f"{file}: {name}"
            )


@pytest.mark.parametrize("app_name", [one.app for one in REGISTRY if one.suite])
def test_the_algorithms_page_has_the_servers_round_and_the_clients_step_from_the_source(
    app_name: str,
) -> None:
    page = hook().algorithm(app_name)
    server, client = page.split("## Server")[1].split("## Client")
    assert "def round(self, state: State, run: RoundContext)" in server or "class FactorAveraging" in server
    for column, folders in ((server, ("strategies/",)), (client, ("clients/", "wire/"))):
        shown = re.findall(r"^\[(\S+\.py)\].*?\n\n````python\n(.*?)\n````$", column, re.MULTILINE | re.DOTALL)
        assert shown
        for file, code in shown:
            assert file.startswith(folders)
            lines = [line.strip() for line in code.splitlines()]
            assert "\n".join(lines) in "\n".join(map(str.strip, (ROOT / file).read_text().splitlines()))


@pytest.mark.parametrize("app_name", [one.app for one in REGISTRY])
def test_an_apps_page_is_short_and_its_links_work_without_the_repository(app_name: str) -> None:
    """`flwr app publish` shows it elsewhere, with the app's own files only."""
    folder = ROOT / "flower_apps" / app_name
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    front = yaml.safe_load(text.split("---\n")[1])
    assert front.keys() == {"title", "url", "labels", "dataset"}
    assert front["url"] in text.split("---\n", 2)[2]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "#")):
            file = (folder / target.partition("#")[0]).resolve()
            assert file.is_relative_to(folder), target
            assert file.exists(), target


@pytest.mark.xdist_group("results")
@pytest.mark.parametrize("app_name", [one.app for one in REGISTRY if one.suite])
def test_an_apps_page_has_the_sections_of_a_baseline_and_its_count_of_claims(app_name: str) -> None:
    text = (ROOT / "flower_apps" / app_name / "README.md").read_text(encoding="utf-8")
    sections = re.findall("^## (.*)$", re.sub("```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert sections == ["What it does", "Data", "Run", "Expected results", "Learn more", "Cite"]
    results = (ROOT / "flower_apps" / app_name / "RESULTS.md").read_text(encoding="utf-8")
    first = re.sub("<!--.*?-->", "", results).split("\n\n", 1)[1].strip().partition("\n")[0]
    assert first == count(app_name).strip()
    assert first in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_setting_has_a_row_on_the_site(case: AppCase) -> None:
    page = hook().settings(case.folder.name)
    assert [key for key in case.settings.SETTINGS if f"| `{key}` |" not in page] == []


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.is_relative_to(DOCS) and not page.is_relative_to(METHODS)],
    ids=str,
)
def test_a_block_is_run_or_says_what_it_needs(page: Path) -> None:
    for block in blocks(page):
        assert block.language in ("bash", "python", "toml", "ini", "text"), block
        # Who has not got it sees why.
        assert not block.needs or block.language == "bash", block
    # None that `blocks` would miss, for want of a language or for its place in a line.
    assert len(re.findall("^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(
        list(blocks(page))
    )


@pytest.mark.parametrize("page", PAGES, ids=[path.relative_to(ROOT).as_posix() for path in PAGES])
def test_every_command_has_the_options_that_a_page_gives_it(page: Path) -> None:
    for block in blocks(page):
        for words in commands(block):
            parsed = _parsed(words)
            # A GPU that a page needs is not here.
            if not block.needs:
                _check_settings(*parsed)


def _parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the command and its options; fail unless the command line takes these words."""
    command, context = COMMANDS, click.Context(COMMANDS)
    while isinstance(command, click.Group):
        name = words[0]
        found = command.get_command(context, name)
        assert found is not None, f"hedgerow has no command {name!r}"
        command, words, context = found, words[1:], click.Context(found, parent=context, info_name=name)
    try:
        return str(context.info_name), command.make_context(context.info_name, words).params
    except click.UsageError as error:
        pytest.fail(f"{context.info_name} {shlex.join(words)}: {error.format_message()}")


def _check_settings(command: str, options: dict[str, Any]) -> None:
    """Raise SettingsError unless the settings of a run of one of the suite's apps are valid."""
    app_name = Path(str(options.get("app_path", ""))).name
    if command == "run" and app_name in {path.parent.name for path in APPS}:
        # Files and folders of the reader's own are not here.
        settings = [
            text
            for text in options["run_config"] or []
            if not text.endswith(".toml") and "/path/to/" not in text
        ]
        if options.get("own_data"):
            settings.append("partition=own")
        plan_run(find_app(str(ROOT / "flower_apps" / app_name)), settings)
