"""torch's global generator is used by one thread at a time, so that no two threads wait for each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("api", "strategies", "clients", "wire", "tasks", "sim", "flower_apps")
CALLS = (
    "torch.get_rng_state",
    "torch.set_rng_state",
    "torch.manual_seed",
    "torch.seed",
    "torch.default_generator.",
    "torch.random.",
)
# Threads that save, seed and restore, with a garbage collection at every object, in which threads change.
THREADS = """
import gc, sys, threading, time
from hedgerow.global_draws import GlobalDraws, seed_global_draws

gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(1)
sys.setswitchinterval(1e-5)

def work():
    for _ in range(100):
        with GlobalDraws.restored():
            seed_global_draws(1)
        GlobalDraws.of_state_dict(GlobalDraws.now().state_dict()).restore()
        GlobalDraws.now().moved

threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(40)
print(sum(thread.is_alive() for thread in threads), flush=True)
import os
os._exit(0)
"""


def unlocked(tree: ast.AST, locked: bool = False) -> Iterator[str]:
    """Yield the calls outside of ``with TORCH_GENERATOR``."""
    if isinstance(tree, ast.With):
        locked = locked or any(ast.unparse(item.context_expr) == "TORCH_GENERATOR" for item in tree.items)
    if isinstance(tree, ast.Call) and not locked and ast.unparse(tree.func).startswith(CALLS):
        yield ast.unparse(tree)
    for child in ast.iter_child_nodes(tree):
        yield from unlocked(child, locked)


@pytest.mark.parametrize("room", ROOMS)
def test_every_call_is_made_with_the_lock(room: str) -> None:
    found = {
        str(file.relative_to(ROOT)): calls
        for file in (ROOT / room).rglob("*.py")
        if (calls := list(unlocked(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert found == {}


def test_threads_that_use_it_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0\n", done.stderr
