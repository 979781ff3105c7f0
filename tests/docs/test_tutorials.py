"""The site's pages, run as they stand, each in an empty folder."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import DOCS, RUN, blocks, environment


def script(page: Path, folder: Path) -> str:
    """Write a page's files and return its blocks as one shell script."""
    parts = ["set -euo pipefail"]
    for number, block in enumerate(blocks(page)):
        if not block.is_run:
            continue
        if block.title:
            # When its turn comes, since a page may write a file anew.
            source = folder / ".blocks" / str(number)
            source.parent.mkdir(exist_ok=True)
            source.write_text(block.text, encoding="utf-8")
            parts.append(f'mkdir -p "$(dirname {block.title})" && cp {source} {block.title}')
        elif block.language == "python":
            parts.append(f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK")
        else:
            parts.append(block.text)
    return "\n".join(parts)


@pytest.mark.parametrize("notebook", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_and_prints_what_it_shows(notebook: Path, tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**environment(tmp_path), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = "".join("".join(out["text"]) for cell in cells for out in cell["outputs"] if "text" in out)
    # Another processor ends a little differently.
    numbers = [[float(one) for one in re.findall(r"0\.\d+", text)] for text in (run.stdout, shown)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.02)
    assert numbers[0]


# They start deployments or a dozen runs.
@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        ["bash", "-c", script(DOCS / page, tmp_path)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            output, _ = run.communicate(timeout=600)
        except BaseException:
            os.killpg(run.pid, signal.SIGTERM)
            raise
    assert run.returncode == 0, output[-4000:]
