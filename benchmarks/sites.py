"""CEPS: bytes that pass one hub, and the busiest of several sites that serve the same nodes.

    python benchmarks/sites.py > results/ceps/sites.md

Each site is a process with a channel of its own to the others. Its nodes reach it alone, and what it sends to
other sites is what nodes there want to hear, with headers.
"""

import json
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

APP = Path(__file__).resolve().parent.parent / "flower_apps" / "ceps"
SITES = 4
SETTINGS = "iterations=40 samples-low=50 samples-high=100 monitor=false quiet=true workers=1"
CODECS = {"the model (`dense64`)": "dense64", "one bit a measurement": "1bcs"}


def free_addresses(count: int) -> list[str]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


def run(folder: Path, settings: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(APP), "-c", settings]
    with folder.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([*command, "--output-dir", str(folder)], stdout=log, stderr=subprocess.STDOUT)


def traffic(folder: Path) -> dict[str, int]:
    """Return the bytes of each link of the one run in a folder."""
    (summary,) = folder.glob("*/summary.json")
    links = json.loads(summary.read_text())["by_link"]
    return {link: total["payload_bytes"] for link, total in links.items()}


def main() -> None:
    print("| what travels | one hub, bytes | busiest site, bytes with its nodes | sent to other sites |")
    print("|---|---:|---:|---:|")
    for what, codec in CODECS.items():
        settings = f"{SETTINGS} codec='{codec}'"
        with TemporaryDirectory() as folder:
            hub = Path(folder) / "hub"
            peers = ",".join(free_addresses(SITES))
            sites = [Path(folder) / f"site-{d}" for d in range(SITES)]
            runs = [run(hub, settings)]
            runs += [run(site, f"{settings} site={d} peers='{peers}'") for d, site in enumerate(sites)]
            for one, at in zip(runs, [hub, *sites], strict=True):
                if one.wait():
                    raise SystemExit(at.with_suffix(".log").read_text())
            rows = [(nodes(found), found["peer->peer"]) for found in map(traffic, sites)]
            with_nodes, to_sites = max(rows, key=sum)
            print(f"| {what} | {nodes(traffic(hub)):,} | {with_nodes:,} | {to_sites:,} |", flush=True)


def nodes(found: dict[str, int]) -> int:
    return found["hub->node"] + found["node->hub"]


if __name__ == "__main__":
    main()
