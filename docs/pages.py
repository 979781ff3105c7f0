"""What of the repository becomes a page of the site beside the pages in docs/, and where links then lead.

A hook of MkDocs (mkdocs.yml). Apps' READMEs and results and the files of ``PAGES`` are pages. The command
line's page is written from its own help, an app's settings from its settings.py, an algorithm's page from the
functions that its equations name, a notebook is a page, and a file that some page
links to, code for example, is a page under ``source/``.
So every text has one source, in which links are relative, as a code host reads them.
"""

from __future__ import annotations

import ast
import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterator
from html import unescape
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "reference/cli.md"
APPS = sorted(file.parent.name for file in (ROOT / "flower_apps").glob("*/README.md"))
RESULTS = sorted((ROOT / "flower_apps").glob("*/RESULTS.md"))
# The navigation has an entry of this name, whose pages are the apps'.
METHODS = "Methods"
# The pages of an app that has them, by their place on the site.
_OF_APP = {
    "apps": "How to run it",
    "algorithms": "The algorithm",
    "methods": "In detail",
    "results": "Results",
    "settings": "Settings",
}
# A page of the site, and the file of the repository that it is.
PAGES = (
    {f"apps/{app}.md": f"flower_apps/{app}/README.md" for app in APPS}
    | {f"results/{file.parent.name}.md": f"flower_apps/{file.parent.name}/RESULTS.md" for file in RESULTS}
    | {"results/robustness.md": "results/robustness.md"}
    | {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
)
# Pages that are of no file.
SETTINGS = {f"settings/{app}.md": app for app in APPS}
# Methods whose page in docs/methods has a table of equations, each with the functions that compute it.
ALGORITHMS = {
    f"algorithms/{file.stem}.md": file.stem for file in sorted((ROOT / "docs/methods").glob("*.md"))
}
# Notebooks are pages beside themselves.
NOTEBOOKS = {
    file.relative_to(ROOT / "docs").with_suffix(".md").as_posix(): file
    for file in sorted((ROOT / "docs").rglob("*.ipynb"))
}
MADE = {COMMANDS, *SETTINGS}
# Files that are on the site under another name than their own.
_ELSEWHERE = {file: page for page, file in PAGES.items()} | {"README.md": "index.md"}
_PICTURES = (".svg", ".png")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".md": "markdown"}
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?\[(?P<text>[^\]]*)\])\((?P<target>[^)\s]+)\)")
_EQUATIONS = "## The method in equations"
_ON_THE_SITE = " On the site, *The algorithm* shows these functions side by side."
_MATHS = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[([](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)

# Files of the repository that pages link to: where each is on the site.
_found: dict[str, str] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the apps' pages into the navigation, and the version into the footer."""
    config.nav = with_methods(config.nav or [])
    config.copyright = f"Hedgerow {version('hedgerow')}"
    return config


def with_methods(nav: list[Any]) -> list[Any]:
    """Return a navigation whose entry ``METHODS`` has a section for each app, by its README's title."""
    pages = [{_title(app): _pages(app)} for app in APPS]
    return [{METHODS: pages} if entry == METHODS else entry for entry in nav]


def _pages(app: str) -> list[dict[str, str]]:
    named = {f"{place}/{app}.md": title for place, title in _OF_APP.items()}
    return [
        {title: page}
        for page, title in named.items()
        if page in PAGES or page in MADE or page in ALGORITHMS or (ROOT / "docs" / page).is_file()
    ]


def _title(app: str) -> str:
    """Return what the title of a README says before its colon: the method's name."""
    readme = (ROOT / "flower_apps" / app / "README.md").read_text(encoding="utf-8")
    (title, *_) = re.findall("^# (.*)$", readme, re.MULTILINE)
    return str(title).partition(":")[0].strip()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of other files."""
    from mkdocs.structure.files import File, InclusionLevel  # noqa: PLC0415  # Tests read PAGES without MkDocs.

    _found.clear()
    for page, file in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    files.append(File.generated(config, COMMANDS, content=commands()))
    for page, app in SETTINGS.items():
        files.append(File.generated(config, page, content=settings(app)))
    for page, app in ALGORITHMS.items():
        files.append(File.generated(config, page, content=algorithm(app)))
    for page, source in NOTEBOOKS.items():
        text, pictures = notebook(source)
        files.append(File.generated(config, page, content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{PurePosixPath(page).parent}/{name}", content=picture))
    waiting = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        page = waiting.pop()
        content = files.get_file_from_path(page).content_string  # type: ignore[union-attr]
        for _, target in _links(content):
            if (file := _in_repository(page, target)) is None or file in _found:
                continue
            if (place := _place(file)).startswith("source/"):
                if file.endswith(_PICTURES):
                    added = File.generated(config, place, abs_src_path=str(ROOT / file))
                else:
                    added = File.generated(
                        config, place, content=source_page(file), inclusion=InclusionLevel.NOT_IN_NAV
                    )
                    waiting.append(place)
                files.append(added)
            _found[file] = place
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are on the site."""
    here = page.file.src_uri

    def led(match: re.Match[str]) -> str:
        file = _in_repository(here, match["target"])
        if file is None:
            return match[0]
        anchor = match["target"].partition("#")[2]
        if not anchor and file.endswith(".py"):
            name = match["text"].strip("`").partition("(")[0].partition(".")[0]
            anchor = name if name in definitions(file) else ""
        place = os.path.relpath(_found[file], str(PurePosixPath(here).parent))
        return f"{match[1]}({place}{'#' if anchor else ''}{anchor})"

    return _outside_code(markdown, lambda text: _LINK.sub(led, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Typeset equations as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert  # noqa: PLC0415  # Tests read PAGES without it.

    def typeset(match: re.Match[str]) -> str:
        return convert(unescape(match["tex"]), display="inline" if match["tag"] == "span" else "block")

    return _MATHS.sub(typeset, html)


def commands() -> str:
    """Return the page of the command line, made of each command's own help."""
    import typer.main  # noqa: PLC0415
    from click import Context  # noqa: PLC0415
    from typer.cli import get_docs_for_click  # noqa: PLC0415

    from hedgerow.sim.cli import app  # noqa: PLC0415

    command = typer.main.get_command(app)
    return get_docs_for_click(obj=command, ctx=Context(command), name="hedgerow", title="Command line")


def settings(app: str) -> str:
    """Return the page of an app's settings."""
    from hedgerow.sim.runs.app import find_app, settings_module  # noqa: PLC0415
    from hedgerow.sim.runs.settings_files import tables  # noqa: PLC0415

    known = settings_module(find_app(str(ROOT / "flower_apps" / app))).SETTINGS
    return (
        f"# Settings of {_title(app)}\n\n`hedgerow settings {app}` prints the same. Set them with `-c "
        "'key=value'`, in a file `-c file.toml`, or in the app's `pyproject.toml`. An invalid value stops "
        "the run before it starts, with an error that gives the key, the value and the valid values.\n\n"
        f"{tables(known)}"
    )


def notebook(file: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as a page, with what its cells printed, and the pictures that they drew by name."""
    parts, pictures = [], dict[str, bytes]()
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{file.stem}-{len(pictures)}.png"
                pictures[name] = b64decode("".join(data["image/png"]))
                parts.append(f"![A figure that the cell above draws]({name})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def algorithm(app: str) -> str:
    """Return the page of a method's algorithm: its equations, and the functions that compute them.

    The functions are those that the equations' table links to, from their source: what the server does in the
    left column, what a node does and what messages are made of in the right one. Theory is left out.
    """
    page = f"docs/methods/{app}.md"
    section = (ROOT / page).read_text(encoding="utf-8").split(_EQUATIONS)[1].partition("\n## ")[0].strip()
    columns: dict[str, dict[str, str]] = {"Server": {}, "Client": {}}
    for match in _LINK.finditer(section):
        file = os.path.normpath(PurePosixPath(page).parent / match["target"])
        if file.endswith(".py") and not file.endswith("theory.py"):
            name, side = match["text"].strip("`"), "Server" if file.startswith("strategies/") else "Client"
            code = f"````python\n{source_of(file, name)}\n````\n"
            where = f"[{file}](../../{file})"
            columns[side][name] = f"### `{name}` {{ #{_anchor(name)} }}\n\n{where}\n\n{code}"

    def led(match: re.Match[str]) -> str:
        name = match["text"].strip("`")
        here = name in columns["Server"] or name in columns["Client"]
        return f"[`{name}`](#{_anchor(name)})" if here else match[0]

    sides = [
        f"<div markdown>\n\n## {side}\n\n{chr(10).join(shown.values())}\n</div>"
        for side, shown in columns.items()
    ]
    return (
        f"---\nhide: [navigation, toc]\n---\n\n# The algorithm of {_title(app)}\n\n"
        f"{_LINK.sub(led, section.replace(_ON_THE_SITE, ''))}\n\n"
        f'<div class="side-by-side" markdown>\n\n{chr(10).join(sides)}\n\n</div>\n'
    )


def _anchor(name: str) -> str:
    return name.replace(".", "-")


def source_of(file: str, name: str) -> str:
    """Return the source of a module's function, class or method, by its name, as ``Class.method``."""
    text = (ROOT / file).read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for one in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == one]
        if not found:
            raise ValueError(f"{file} has no {name}")
        node = found[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def source_page(file: str) -> str:
    """Return a page that shows a file, or lists a folder; a heading for each definition of a module."""
    path = ROOT / file
    title = f"# {file} {{ data-search-exclude }}\n\n"
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        return title + "".join(f"- [{name}]({path.name}/{name})\n" for name in names)
    lines = path.read_text(encoding="utf-8").splitlines()
    language = _LANGUAGES.get(path.suffix, "text")
    starts = (
        [(0, "")] if path.suffix != ".py" else [(0, ""), *((n - 1, d) for d, n in definitions(file).items())]
    )
    out = [title]
    for (start, name), (end, _) in zip(starts, [*starts[1:], (len(lines), "")], strict=True):
        code = "\n".join(lines[start:end]).strip("\n")
        if name:
            out.append(f"## {name} {{ #{name} data-search-exclude }}\n\n")
        if code:
            out.append(f"````{language}\n{code}\n````\n\n")
    return "".join(out)


def definitions(file: str) -> dict[str, int]:
    """Return the names that a module defines, in their order, each with its first line."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {
        node.name: min([node.lineno, *(d.lineno for d in node.decorator_list)])
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _links(markdown: str) -> Iterator[tuple[str, str]]:
    """Yield text and target of each link outside code."""
    found: list[tuple[str, str]] = []
    _outside_code(
        markdown, lambda text: str(found.extend((m["text"], m["target"]) for m in _LINK.finditer(text)))
    )
    yield from found


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    out, end = [], 0
    for fence in _FENCE.finditer(markdown):
        out += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*out, change(markdown[end:])])


def _in_repository(page: str, target: str) -> str | None:
    """Return the file of the repository that a page links to; None for an address or an anchor."""
    target = target.partition("#")[0]
    if not target or ":" in target or page in MADE:
        return None
    file = os.path.normpath(PurePosixPath(_origin(page)).parent / target)
    # What is not there stays as it is: MkDocs says so.
    return None if file.startswith("..") or not (ROOT / file).exists() else file


def _origin(page: str) -> str:
    """Return the file of the repository that a page is made of."""
    if page.startswith("source/"):
        return page.removeprefix("source/").removesuffix(".md")
    return PAGES.get(page, f"docs/{page.replace('algorithms/', 'methods/')}")


def _place(file: str) -> str:
    """Return where a file of the repository is on the site."""
    if (page := _ELSEWHERE.get(file) or _ELSEWHERE.get(f"{file}/README.md")) is not None:
        return page
    if file.startswith("docs/") and not file.endswith((".py", ".json")) and "examples" not in file:
        return re.sub(r"\.ipynb$", ".md", file.removeprefix("docs/"))
    return f"source/{file}" + ("" if file.endswith(_PICTURES) else ".md")


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages that a navigation names."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)
