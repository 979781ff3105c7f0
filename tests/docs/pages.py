"""The site's pages as tests read them: their code blocks, and which of them are run.

A page's blocks make one session in an empty folder: ``python title="x.py"`` and ``toml title="x.toml"`` are
written there, other ``python`` blocks and all ``bash`` blocks are run, in their order; blocks of other
languages are only shown. A block after a paragraph that begins with ``**Needs``, or in a section that begins
with ``**All of this section needs``, is shown and not run: it says what it needs. The pages of ``METHODS``
are like the apps' READMEs, whose commands take long: test_commands.py starts those.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
METHODS = DOCS / "methods"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is, its text, whether it needs what is not here."""

    language: str
    title: str
    text: str
    needs: bool

    @property
    def is_run(self) -> bool:
        """Whether it is a file of the page's session or a part of it."""
        return not self.needs and (bool(self.title) or self.language in ("bash", "python"))


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    content, end = page.read_text(encoding="utf-8"), 0
    for match in _BLOCK.finditer(content):
        paragraph = content[end : match.start()].strip().rpartition("\n\n")[2]
        text = _BLOCK.sub("", content[: match.start()])
        section = re.split("^#+ .*$", text, flags=re.MULTILINE)[-1].strip()
        needs = paragraph.startswith("**Needs ") or section.startswith("**All of this section needs ")
        yield Block(match[1], match[2] or "", match[3], needs)
        end = match.end()


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the lines of a shell block that call hedgerow, continued ones joined."""
    if block.language != "bash":
        return
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        for part in re.split(r"&&|\|\|", line):
            words = shlex.split(part, comments=True)
            while words and words[0] in ("!", "sudo", "nice"):
                words = words[1:]
            if words and words[0].rpartition("/")[2] == "hedgerow":
                yield words[1:]


def environment(folder: Path) -> dict[str, str]:
    """Return a reader's shell variables, in a folder of its own, with this environment's programs."""
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(folder / ".flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
    }
    variables.pop("HEDGEROW_DATA_DIR", None)
    return variables


def hook() -> ModuleType:
    """Return docs/pages.py, which MkDocs loads as a hook."""
    spec = spec_from_file_location("hedgerow_site", DOCS / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Pages with blocks that are run.
RUN = [
    page.relative_to(DOCS).as_posix()
    for page in sorted(DOCS.rglob("*.md"))
    if not page.is_relative_to(METHODS) and any(block.is_run for block in blocks(page))
]
