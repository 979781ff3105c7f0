"""What a benchmark found, for a program: ``all.py`` puts it into one table."""

import json
import os
from pathlib import Path

# Names the file that findings are appended to, a line of JSON each; without it there is nothing to do.
REPORT = "HEDGEROW_BENCHMARK_REPORT"


def report(what: str, value: float, unit: str, ratio: float | None = None, of: str = "") -> None:
    """Note a finding, beside what the script prints.

    ``ratio`` says how it compares with what ``of`` names: more than 1 is better than that, unless ``of`` says
    otherwise.
    """
    if file := os.environ.get(REPORT):
        line = {"what": what, "value": value, "unit": unit, "ratio": ratio, "of": of}
        with Path(file).open("a") as lines:
            lines.write(json.dumps(line) + "\n")
