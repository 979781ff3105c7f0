"""Workers as actors of an existing Ray cluster.

Ray's driver is a separate process (the *broker*), because Ray ends the driver of a lost cluster, starts
threads and handles signals, none of which should affect the ServerApp's process. The broker starts an actor
where ``workers.py`` would fork a process, and forwards parcels between its link and the actor. Arrays for
several workers are stored in Ray's object store once, and fetched once by each machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hedgerow.sim.engine.parcels import Parcel, Received, file_bytes, receive, receive_files, send, write_file
from hedgerow.wire.failures import RunFailedError
from hedgerow.wire.links.proxies import without_proxy_here

# The number of a worker.
KEY = struct.Struct("=Q")
LONGEST_PACKET = 2000
MOST_WORKERS = 1024
_ADDRESS = re.compile(r"auto|(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})")
_CONNECTING = 5.0
# Seconds. A cluster answers in two; a cold import of torch from a shared folder takes half a minute.
_ANSWERING = 60.0
_STARTING = 120.0
_FREE_AFTER = 10.0
_ALIGN = 64
_CURRENT = Path("/tmp/ray/ray_current_cluster")
_READY, _REFUSED = 0, 1


class ClusterError(RunFailedError):
    """A Ray cluster does not answer, has no room, cannot load the app, or is lost."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster, and the packages to send there.

    Parameters
    ----------
    address : str
        ``"HOST:PORT"`` of its head node, or ``"auto"`` for the cluster that this machine belongs to.
    modules : tuple of str (default: none)
        Folders of Python packages to send to its machines.
    """

    address: str
    modules: tuple[str, ...] = ()


def check_address(address: str) -> None:
    """Raise ValueError if an address is not one of a Ray cluster, or Ray is not installed."""
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found is None or (found[2] is not None and not 0 < int(found[2]) < 2**16):
        raise ValueError(
            "ray must be the address of a Ray cluster, 'HOST:PORT' of its head node, or 'auto' on a machine "
            f"that is one of its nodes, got {address!r}"
        )
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"ray = {address!r} needs Ray: pip install 'flwr[simulation]'")


def open_cluster(
    cluster: Cluster, handlers: Any, workers: int, most: int
) -> tuple[socket.socket, int, Callable[[], object]]:
    """Start a broker; return the link to it, the number of workers, and a function that waits for its end.

    Parameters
    ----------
    cluster : Cluster
        The cluster to join.
    handlers : Handlers
        The handlers for the actors, which cloudpickle must support.
    workers : int
        Requested workers, >= 0; 0 for the number of free CPUs, or of free GPUs if nodes may train on them.
    most : int
        Upper bound of useful workers, >= 1.

    Raises
    ------
    ClusterError
        If nothing answers there, or there is no room.
    """
    cloudpickle = importlib.import_module("ray.cloudpickle")
    _knock(cluster.address)
    try:
        pickled = cloudpickle.dumps(handlers)
    except Exception as error:
        raise ClusterError(f"ray: this ClientApp cannot be sent to other machines: {error}") from error
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import _broker; _broker({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=without_proxy_here(os.environ),
            # Ray writes its own log; relevant errors are reported here.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        asked = {
            "address": cluster.address,
            "modules": cluster.modules,
            "handlers": pickled,
            "device": str(handlers.run_config.get("device", "auto")),
            "workers": workers,
            "most": most,
            "here": {**_here(), "seed": handlers.seed},
        }
        _tell(ours, _READY, asked)
        ours.settimeout(_ANSWERING)
        said = receive(ours)
        ours.settimeout(None)
    except TimeoutError:
        said = None
    except BaseException:
        ours.close()
        process.kill()
        process.wait()
        raise
    kind, answer = (_REFUSED, "nothing there answers as a Ray cluster does") if said is None else _read(said)
    if kind == _REFUSED:
        ours.close()
        process.kill()
        process.wait()
        raise ClusterError(f"ray: {cluster.address}: {answer}")
    return ours, int(answer), lambda: _wait(process)


def _knock(address: str) -> None:
    """Raise ClusterError if nothing listens; Ray itself would retry for minutes."""
    if address == "auto":
        # Ray's own sources of the address. The file of a killed cluster remains.
        with suppress(OSError):
            address = os.environ.get("RAY_ADDRESS") or _CURRENT.read_text().strip()
        found = _ADDRESS.fullmatch(address)
        if found is None or found[1] is None:
            return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECTING).close()
    except OSError as error:
        raise ClusterError(f"ray: nothing answers at {address} ({error}); is 'ray start' running?") from error


def _here() -> dict[str, Any]:
    """Return the paths, folder and environment that an actor copies from this process."""
    return {
        "paths": [str(Path(path).absolute()) for path in sys.path if path],
        "folder": str(Path.cwd()),
        "environment": {key: value for key, value in os.environ.items() if key.startswith("HEDGEROW_")},
    }


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_CONNECTING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tell(link: socket.socket, kind: int, thing: object) -> None:
    parcel = Parcel()
    at = parcel.add(thing)
    file = parcel.close()
    try:
        send(link, kind, at, (file, parcel.size))
    finally:
        os.close(file)


def _read(received: tuple[int, Any, Received]) -> tuple[int, Any]:
    kind, at, parcel = received
    return kind, parcel.read(at)


# The broker


def _broker(descriptor: int) -> None:
    """Connect to the cluster and start an actor for each received key, until the link closes."""
    control = socket.socket(fileno=descriptor)
    received = receive(control)
    if received is None:
        return
    _, asked = _read(received)
    warnings.simplefilter("ignore")
    try:
        broker = _Broker(control, asked)
    except Exception as error:
        _tell(control, _REFUSED, _first_line(error))
        return
    _tell(control, _READY, broker.count)
    while key := control.recv(KEY.size):
        threading.Thread(target=broker.start, args=(key,), daemon=True).start()
    # Threads may be waiting for actors, which Ray ends with their driver.
    os._exit(0)


class _Broker:
    def __init__(self, control: socket.socket, asked: Mapping[str, Any]) -> None:
        self._ray = ray = importlib.import_module("ray")
        self._control = control
        modules = {"py_modules": list(asked["modules"]), "excludes": ["**/__pycache__"]}
        ray.init(
            address=asked["address"],
            runtime_env=modules if asked["modules"] else None,
            log_to_driver=False,
            configure_logging=False,
            namespace="hedgerow",
        )
        self.count, options = _room(ray, asked)
        self._needs = options
        self._actor = ray.remote(_Actor).options(scheduling_strategy="SPREAD", max_restarts=0, **options)
        self._handlers = ray.put(asked["handlers"])
        self._here = asked["here"]
        self._lock = threading.Lock()
        self._living = 0
        # The current call's common parcel, by its file.
        self._common: tuple[int, tuple[int, int], Any] | None = None

    def start(self, key: bytes) -> None:
        """Start an actor, answer with a link to it, and forward parcels."""
        actor, reason = self._started()
        if actor is None:
            self._control.send(key + reason.encode()[: LONGEST_PACKET - KEY.size], socket.MSG_NOSIGNAL)
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                socket.send_fds(self._control, [key], [theirs.fileno()], socket.MSG_NOSIGNAL)
            # Any error closes the link, which tells the other end that the worker died.
            with suppress(self._ray.exceptions.RayError, OSError):
                while self._passed_on(ours, actor):
                    pass
        with self._lock:
            self._living -= 1
        self._ray.kill(actor)

    def _started(self) -> tuple[Any, str]:
        with self._lock:
            self._living += 1
            needed = {name: self._living * share for name, share in _resources(self._needs).items()}
        here = self._ray.cluster_resources()
        missing = [name for name, amount in needed.items() if here.get(name, 0) < amount]
        actor, reason = None, f"its machines have not {needed[missing[0]]:g} {missing[0]}" if missing else ""
        if not reason:
            actor = self._actor.remote()
            try:
                reason = self._ray.get(actor.load.remote(self._handlers, self._here), timeout=_STARTING)
            except self._ray.exceptions.GetTimeoutError:
                reason = f"no free CPU or GPU in {_STARTING:g} s"
            except self._ray.exceptions.RayError as error:
                reason = _first_line(error)
        if not reason:
            return actor, ""
        with self._lock:
            self._living -= 1
        if actor is not None:
            self._ray.kill(actor)
        return None, reason

    def _passed_on(self, link: socket.socket, actor: Any) -> bool:
        """Let an actor answer one parcel; return whether there was one."""
        with receive_files(link) as received:
            if received is None:
                return False
            _, at, files = received
            own = file_bytes(*files[0])
            common = self._shared(*files[1]) if len(files) > 1 else None
        kind, address, whole = self._ray.get(actor.reply.remote(at, own, common))
        file = write_file([whole])
        try:
            send(link, kind, address, (file, whole.nbytes))
        finally:
            os.close(file)
        return True

    def _shared(self, file: int, size: int) -> Any:
        """Return the object store's reference to a common parcel, stored there once."""
        about = os.fstat(file)
        name = about.st_dev, about.st_ino
        with self._lock:
            if self._common is None or self._common[1] != name:
                if self._common is not None:
                    os.close(self._common[0])
                # Kept open, so that its inode number is not reused.
                self._common = os.dup(file), name, self._ray.put(file_bytes(file, size))
            return self._common[2]


def _room(ray: Any, asked: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return the number of actors to start, and what each reserves; ClusterError if there is no room."""
    workers, most = asked["workers"], asked["most"]
    end = time.monotonic() + _FREE_AFTER
    while True:
        # The resources of a run that has just ended are released after a moment.
        free = ray.available_resources()
        count, options = _dealt(workers, most, asked["device"], ray.cluster_resources(), free)
        if count:
            return count, options
        if time.monotonic() > end:
            raise ClusterError("no CPU or GPU is free")
        time.sleep(0.2)


def _dealt(
    workers: int, most: int, device: str, total: Mapping[str, float], free: Mapping[str, float]
) -> tuple[int, dict[str, float]]:
    gpus = int(total.get("GPU", 0)) if device != "cpu" else 0
    if gpus:
        # One stack uses a GPU better than several; several share one only at the user's request.
        count = min(workers or int(free.get("GPU", 0)), most)
        return count, {"num_cpus": 0, "num_gpus": min(1.0, gpus / max(1, count))}
    cpus = int(total.get("CPU", 0))
    if min(workers, most) > cpus:
        raise ClusterError(f"workers must be at most the cluster's {cpus} CPUs, got {workers}")
    return min(workers or int(free.get("CPU", 0)), most), {"num_cpus": 1}


def _resources(options: Mapping[str, float]) -> dict[str, float]:
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0)}
    return {name: amount for name, amount in named.items() if amount}


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


# Actors


class _Actor:
    """A shard in a process that Ray started."""

    def load(self, handlers: bytes, here: Mapping[str, Any]) -> str:
        """Load the app; return an error message, empty on success."""
        # One thread, as in every worker, whatever number of CPUs Ray reserved.
        os.environ.update(here["environment"], OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # After Ray's own entries, because packages that were sent take precedence.
        sys.path += [path for path in here["paths"] if path not in sys.path and Path(path).exists()]
        if Path(here["folder"]).is_dir():
            os.chdir(here["folder"])
        try:
            shards = importlib.import_module("hedgerow.sim.engine.shards")
            shards.seed_generators(here["seed"])  # The app may draw when it is imported.
            self._shard = shards.Shard(pickle.loads(handlers))
        except Exception as error:
            return f"{socket.gethostname()} cannot load the app: {type(error).__name__}: {error}"
        return ""

    def reply(
        self, at: Any, own: NDArray[np.uint8], common: NDArray[np.uint8] | None
    ) -> tuple[int, Any, NDArray[np.uint8]]:
        """Return the reply to a request."""
        parcel = Received(_aligned(own), None if common is None else _aligned(common))
        kind, address, out = self._shard.reply(at, parcel)
        return kind, address, out.joined()


def _aligned(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a read-only array with a parcel's alignment, on which bits may depend."""
    if array.ctypes.data % _ALIGN:
        room = np.empty(array.size + _ALIGN, np.uint8)
        begin = -room.ctypes.data % _ALIGN
        room[begin : begin + array.size] = array
        array = room[begin : begin + array.size]
    array = array.view()
    array.flags.writeable = False
    return array


def app_packages(folder: Path) -> Sequence[str]:
    """Return the Python packages in an app's folder, which other machines may not have."""
    return sorted(str(init.parent) for init in folder.glob("*/__init__.py"))
