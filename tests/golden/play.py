"""Run rows from one checkout and write their results; started by compare.py as a separate process.

``python play.py ORDER.json`` where the order has ``checkout``, ``out`` (a folder, with one JSON file per
row), ``transcripts`` and ``rows``. PYTHONPATH must have the checkout's packages. Every row runs in its own
forked process, so that no row affects another.
"""

import csv
import ctypes
import gc
import hashlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

# From this checkout, whichever one is run.
sys.path.append(str(Path(__file__).parents[2]))
from tests.golden.table import Row

# Seconds for a row; the slowest takes about ten.
PATIENCE = 120.0
_PR_SET_PDEATHSIG = 1
# Entries of the run folder that are not results.
_SECONDS = (
    "wall_seconds",
    "wall-seconds",
    "gossip-seconds",
    "site-seconds",
    "model-exchange-seconds",
    "link-send-seconds",
    "link-wait-seconds",
    # Depends on when other processes send.
    "link-bytes-received",
)
_LEDGER = ("bits", "payload_bytes", "by_link")
_CLOCK = ("sim_seconds",)
_PRIVACY = ("epsilon", "delta", "releases", "unprotected", "privacy")
# Records and keys ("*" for any) whose bytes depend on the operating system's random numbers, because they are
# masked or, on sealed links, encrypted: only their lengths are compared.
MASKED = (("masked", "masked"), ("shares", "*"), ("config", "sealed"))
SEALED = (("sealed", "*"), ("payload", "*"), ("bundle", "*"), ("config", "labels"))


def main() -> None:
    """Run an order's rows."""
    order = json.loads(Path(sys.argv[1]).read_text())
    checkout, out = Path(order["checkout"]), Path(order["out"])
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rows = [Row(**row) for row in order["rows"]]
    _imported(checkout, rows)
    # Forked processes share these objects.
    gc.freeze()
    for number, row in enumerate(rows):
        began = time.perf_counter()
        parts = _parts(row, checkout, order["transcripts"])
        result = {"name": row.name, "parts": parts, "seconds": round(time.perf_counter() - began, 3)}
        partial = out / f"{number}.partial"
        partial.write_text(json.dumps(result))
        partial.rename(out / f"{number}.json")


def _imported(checkout: Path, rows: list[Row]) -> None:
    """Import once what rows need; all of the suite must come from the checkout."""
    importlib.import_module("hedgerow.sim.runs.launch")
    importlib.import_module("hedgerow.sim.runs.recorder")
    for app in {row.app for row in rows}:
        folder = checkout / "flower_apps" / app
        if folder.is_dir():
            importlib.import_module("hedgerow.sim").load_app(folder)
    _check_origins(checkout)


def _check_origins(checkout: Path) -> None:
    apps = {path.name for path in checkout.glob("flower_apps/*/*") if path.is_dir()}
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if name.partition(".")[0] in {"hedgerow", *apps} and origin is not None:
            assert Path(origin).resolve().is_relative_to(checkout.resolve()), (
                f"{name} comes from {origin}, not {checkout}"
            )


# A row


def _parts(row: Row, checkout: Path, transcripts: bool) -> list[dict[str, Any]]:
    """Run a row; return the result of each of its runs: one, or one per linked server."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        common = {"transcripts": transcripts and row.transcript}
        if not row.peers:
            first = _forked(folder, 0, lambda: _played(row, checkout, folder / "run", **common))
            if not row.killed or "exit" in first:
                return [first]
            # It was killed: resume it in a new process.
            again = _forked(folder, 1, lambda: _played(row, checkout, folder / "run", resume=True, **common))
            return [again]
        peers = ",".join(_addresses(row.peers))
        key = {"sd-feel": "edge", "ceps": "site"}[row.app]
        pids = [
            _fork(
                folder, i,
                lambda i=i: _played(
                    row, checkout, folder / f"run{i}", more={"peers": peers, key: i}, **common
                ),
            )
            for i in range(row.peers)
        ]  # fmt: skip
        return [_end(folder, i, pid) for i, pid in enumerate(pids)]


def _forked(folder: Path, number: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return _end(folder, number, _fork(folder, number, work))


def _fork(folder: Path, number: int, work: Callable[[], dict[str, Any]]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        # End with the player, even if that is killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with (folder / f"log{number}").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            (folder / f"result{number}.json").write_text(json.dumps(work()))
        code = 0
    except BaseException:
        (folder / f"error{number}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _end(folder: Path, number: int, pid: int) -> dict[str, Any]:
    """Wait for a forked process; return its result, or how it ended."""
    deadline = time.monotonic() + PATIENCE
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"exit": ["timeout", f"more than {PATIENCE:g} s"]}
        time.sleep(0.005)
    # End its remaining workers.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    result = folder / f"result{number}.json"
    if result.exists():
        return dict(json.loads(result.read_text()))
    if os.WIFSIGNALED(ended[1]):
        return {"killed": os.WTERMSIG(ended[1])}
    error = folder / f"error{number}"
    text = error.read_text() if error.exists() else "?"
    return {"exit": ["broken", text.strip().splitlines()[-1]], "log": text}


def _played(
    row: Row,
    checkout: Path,
    out: Path,
    *,
    transcripts: bool,
    resume: bool = False,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a row in this process; return its result."""
    out.mkdir(exist_ok=True)
    app = checkout / "flower_apps" / row.app
    if not app.is_dir():
        return {"there": False, "why": f"no app {row.app}"}
    passed: list[list[Any]] = []
    privacy: list[str] = []
    result: dict[str, Any] = {"there": True}
    with ExitStack() as stack:
        stack.enter_context(_privacy_log(privacy))
        if transcripts:
            sealed = row.app in ("ceps", "hsgd") and row.settings.get("sealed", True)
            stack.enter_context(recorded(passed, (*MASKED, *SEALED) if sealed else MASKED))
        if row.late or row.killed:
            stack.enter_context(_on_rounds(row, kill=not resume))
        try:
            result |= _run(row, app, out, resume, more or {})
            exit_code, first = (0, "") if result["there"] else (None, "")
        except BaseException as error:
            text = str(error).replace(str(out.parent), "OUT").strip()
            exit_code = 2 if type(error).__name__ in ("SettingsError", "RunFolderError") else 1
            # An error of settings begins with a heading.
            first = f"{type(error).__name__}: {' '.join(text.splitlines()[:2])}"
            traceback.print_exc()
    _check_origins(checkout)
    if not result["there"]:
        return result
    result |= {"exit": [exit_code, first], **results(out), "privacy-log": privacy}
    if transcripts:
        result["transcript"] = passed
    return result


def _run(row: Row, app: Path, out: Path, resume: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    if row.script:
        import scripts

        return scripts.play(row, out)
    from hedgerow.sim import load_app, plan_run, run_app
    from hedgerow.sim.runs.plan import resumed_config

    loaded = load_app(app)
    settings = {**row.settings, **row.faults, **more}
    missing = sorted(k for k in settings if k not in loaded.spec.config and not k.startswith("fault-"))
    if missing:
        return {"there": False, "why": f"no setting {', '.join(missing)}"}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    if resume:
        (earlier,) = out.iterdir()
        overrides = resumed_config(loaded.spec, str(earlier))
    configs = _node_configs(row, out.parent)
    plan = plan_run(
        loaded.spec,
        [*overrides, f"output-dir={json.dumps(str(out))}", "quiet=true"],
        workers=1 if row.workers is None else row.workers,
    )
    run_app(loaded, plan, node_configs=configs, strict=row.strict)
    return {}


def _node_configs(row: Row, folder: Path) -> list[dict[str, Any]] | None:
    """Return the node configs; their files are written once."""
    count = int(row.settings["num-clients"])
    place = folder / "own"
    configs: list[dict[str, Any]] = []
    if row.data == "parties":
        configs = _parties(place, count)
    elif row.data == "tables":
        place.mkdir(exist_ok=True)
        configs = [
            {"data": _table(place / f"{i}.csv", 30 + 10 * i, i), "label": "outcome"} for i in range(count)
        ]
        servers = int(row.settings.get("num-servers", 0)) * (row.settings.get("edge-servers") == "nodes")
        configs += [{} for _ in range(servers)]
        if row.settings.get("clusters") == "group":
            for i, config in enumerate(configs):
                config["group"] = f"place {i % int(row.settings['num-servers'])}"
    if row.policy:
        for i, config in enumerate(configs):
            (place / f"policy{i}.toml").write_text(row.policy.replace("ledger.", f"ledger{i}."))
            config["policy"] = str(place / f"policy{i}.toml")
    return configs or None


def _table(path: Path, samples: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50, 10, samples), rng.normal(1e-3, 1e-4, samples)
    sick = (age - 50) / 10 + (dose - 1e-3) / 1e-4 > 0
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["age", "outcome", "dose"])
        lines.writerows(
            zip(age.tolist(), np.where(sick, "sick", "well").tolist(), dose.tolist(), strict=True)
        )
    return str(path)


def _parties(folder: Path, count: int) -> list[dict[str, Any]]:
    """Write the files of hospitals and edges, with a common key to match people by."""
    from hedgerow.tasks import load_vertical, write_groups

    data, groups = load_vertical("breast-cancer"), count // 2
    rows = np.random.default_rng(0).permutation(len(data.y_train))[: 24 * groups].reshape(groups, 24)
    known = folder / "configs.json"
    if not known.exists():
        configs = [{**one, "min-people": 2} for one in write_groups(data, list(rows), folder, "edges")]
        for m in range(groups):
            (folder / f"group-{m}" / "match.key").write_bytes(bytes(range(32)))
        known.write_text(json.dumps(configs))
    return list(json.loads(known.read_text()))


def _addresses(count: int) -> list[str]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]


# Hooks


def _on_rounds(row: Row, *, kill: bool) -> ExitStack:
    """Kill the process at the end of a round, and keep late nodes offline until theirs."""
    from hedgerow.sim import InProcessGrid, RunRecorder

    stack, ended = ExitStack(), [-1]
    real, nodes, ids = RunRecorder.on_round_end, InProcessGrid.get_nodes, InProcessGrid.get_node_ids

    def on_round_end(self: Any, end: Any) -> None:
        real(self, end)
        ended[0] = end.round
        if kill and row.killed and end.round == row.killed:
            os.kill(os.getpid(), signal.SIGKILL)

    def away(grid: Any) -> set[int]:
        # A JSON object's keys are strings.
        late = {int(at) for at, number in row.late.items() if number > ended[0]}
        return {node.node_id for node in grid._nodes.values() if node.partition_id in late}

    stack.enter_context(patch.object(RunRecorder, "on_round_end", on_round_end))
    if row.late:
        stack.enter_context(
            patch.object(
                InProcessGrid, "get_nodes",
                lambda self: [one for one in nodes(self) if one.node_id not in away(self)],
            )
        )  # fmt: skip
        stack.enter_context(
            patch.object(
                InProcessGrid,
                "get_node_ids",
                lambda self: [one for one in ids(self) if one not in away(self)],
            )
        )
    return stack


def _privacy_log(lines: list[str]) -> ExitStack:
    """Collect the log lines about privacy."""
    logger, stack = logging.getLogger("flwr"), ExitStack()

    class Keep(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            text = record.getMessage()
            if "rivacy" in text or "epsilon" in text:
                lines.append(text.strip())
            return False

    keep = Keep()
    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    stack.callback(logger.removeFilter, keep)
    return stack


def recorded(passed: list[list[Any]], random: Sequence[tuple[str, str]] = ()) -> ExitStack:
    """Collect every message on the engine's grid, ``described``, in the order of the server's calls."""
    from hedgerow.sim import InProcessGrid

    stack = ExitStack()
    push, pull = InProcessGrid.push_messages, InProcessGrid.pull_messages

    def pushed(self: Any, messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            meta = message.metadata
            passed.append(described("->", meta.dst_node_id, message, self, random))
        return push(self, messages)

    def pulled(self: Any, message_ids: Any) -> Any:
        replies = pull(self, message_ids)
        for reply in replies:
            passed.append(described("<-", reply.metadata.src_node_id, reply, self, random))
        return replies

    stack.enter_context(patch.object(InProcessGrid, "push_messages", pushed))
    stack.enter_context(patch.object(InProcessGrid, "pull_messages", pulled))
    # Make every exchange use messages.
    stack.enter_context(patch.object(InProcessGrid, "columns", lambda *_: None, create=True))
    return stack


def described(
    way: str, node_id: int, message: Any, grid: Any, random: Sequence[tuple[str, str]]
) -> list[Any]:
    """Return (round, direction, partition, message type, records, bytes of arrays) of a message."""
    meta = message.metadata
    node = grid._all.find(node_id)
    head = [meta.group_id, way, node.partition_id if node is not None else None, meta.message_type]
    if not message.has_content():
        return [*head, {"error": [message.error.code, message.error.reason]}, 0]
    records, size = {}, 0
    for name, record in message.content.items():
        values = {
            key: _value(value, any(r in ("*", name) and k in ("*", key) for r, k in random))
            for key, value in record.items()
        }
        size += sum(value[2] for value in values.values() if value[0] == "array")
        records[name] = [type(record).__name__, values]
    return [*head, records, size]


def _value(value: Any, is_random: bool) -> list[Any]:
    """Describe a value: (kind, dtype and shape, bytes, digest)."""
    if hasattr(value, "numpy"):
        held = np.ascontiguousarray(value.numpy())
        shape = f"{value.dtype}{tuple(value.shape)} {value.stype}"
        return ["array", shape, held.nbytes, "random" if is_random else _digest(held.tobytes())]
    if isinstance(value, bytes):
        return ["bytes", "", len(value), "random" if is_random else _digest(value)]
    if isinstance(value, list):
        kinds = sorted({type(one).__name__ for one in value})
        if value and isinstance(value[0], bytes):
            length, text = sum(map(len, value)), _digest(b"".join(value))
        else:
            length, text = (
                len(value),
                json.dumps(value) if len(value) <= 4 else _digest(json.dumps(value).encode()),
            )
        return ["list", " ".join(kinds), [len(value), length], "random" if is_random else text]
    return [type(value).__name__, "", None, repr(value)]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# Run folders


def results(out: Path) -> dict[str, Any]:
    """Return the results of the only run in a folder of runs."""
    folders = [path for path in out.iterdir() if path.is_dir()] if out.is_dir() else []
    if not folders:
        return {}
    (folder,) = folders
    lines = (folder / "rounds.jsonl").read_text().splitlines() if (folder / "rounds.jsonl").exists() else []
    records = [_without_seconds(json.loads(line)) for line in lines]
    found: dict[str, Any] = {
        "ledger": [{key: record.pop(key, None) for key in _LEDGER} for record in records],
        "clock": [[record.pop(key, None) for key in _CLOCK] for record in records],
        "privacy": [_privacy(record) for record in records],
        "rounds": records,
    }
    summary = folder / "summary.json"
    if summary.exists():
        found["summary"] = _without_seconds(json.loads(summary.read_text()))
    model = folder / "model.npz"
    if model.exists():
        with np.load(model) as arrays:
            found["model"] = {
                key: f"{array.dtype}{array.shape} {_digest(array.tobytes())}"
                for key, array in sorted(arrays.items())
            }
    return found


def _without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_seconds(one) for key, one in value.items() if key not in _SECONDS}
    return [_without_seconds(one) for one in value] if isinstance(value, list) else value


def _privacy(record: dict[str, Any]) -> dict[str, Any]:
    """Remove the entries about privacy from a round's record, and return them."""
    found: dict[str, Any] = {}
    for part in ("train", "central"):
        values = record.get(part) or {}
        for key in [key for key in values if key.startswith(_PRIVACY)]:
            found[f"{part}.{key}"] = values.pop(key)
    return found


if __name__ == "__main__":
    main()
