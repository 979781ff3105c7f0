"""CEPS: bytes that pass one hub, and the busiest of several sites that serve the same nodes.

    python benchmarks/sites.py > results/ceps/sites.md

Each site is a process with a channel of its own to the others. Its nodes reach it alone, and what it sends to
other sites is what nodes there want to hear, with headers.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from processes import free_addresses, links_of, run_together

APP = Path(__file__).resolve().parent.parent / "flower_apps" / "ceps"
SITES = 4
SETTINGS = "iterations=40 samples-low=50 samples-high=100 monitor=false quiet=true workers=1"
CODECS = {"the model (`dense64`)": "dense64", "one bit per measurement": "1bcs"}


def main() -> None:
    command = [sys.executable, "-m", "hedgerow.sim", "run", str(APP), "-c"]
    print(
        "| message | one hub: bytes to and from nodes "
        "| busiest site: bytes to and from its nodes | busiest site: bytes to other sites |"
    )
    print("|---|---:|---:|---:|")
    for what, codec in CODECS.items():
        settings = f"{SETTINGS} codec='{codec}'"
        with TemporaryDirectory() as place:
            hub = Path(place) / "hub"
            sites = [Path(place) / f"site-{d}" for d in range(SITES)]
            peers = ",".join(free_addresses(SITES))
            run_together([[*command, f"{settings} output-dir={hub}"]])
            run_together(
                [
                    [*command, f"{settings} site={d} peers='{peers}' output-dir={site}"]
                    for d, site in enumerate(sites)
                ]
            )
            found = [links_of(site) for site in sites]
            with_nodes, to_sites = max(((nodes(links), links["peer->peer"]) for links in found), key=sum)
            print(f"| {what} | {nodes(links_of(hub)):,} | {with_nodes:,} | {to_sites:,} |", flush=True)


def nodes(links: dict[str, int]) -> int:
    return links["hub->node"] + links["node->hub"]


if __name__ == "__main__":
    main()
