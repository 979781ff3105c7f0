"""A limit on the memory that a process allocates while it handles a message.

It is the kernel's RLIMIT_DATA: private writable memory, including anonymous mappings (Linux 4.7 and later)
and thread stacks, without read-only mapped files and GPU memory.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


def can_limit_memory() -> bool:
    """Return whether this system can limit a process's memory; only Linux can."""
    return sys.platform == "linux" and _STATUS.exists()


@contextmanager
def limited_memory(most: int | None) -> Iterator[None]:
    """Let the process allocate at most ``most`` >= 1 further bytes; beyond that the block gets a MemoryError.

    A lower limit that is already set stays, and the former limit is restored at the end. None sets no limit.
    OSError if this system has no such limit.
    """
    if most is None:
        yield
        return
    if not can_limit_memory():
        raise OSError("the memory of a process can be limited only on Linux")
    import resource  # noqa: PLC0415, not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [one for one in (soft, hard, _allocated() + most) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means out of memory; torch raises a plain RuntimeError for it."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _allocated() -> int:
    """Return the bytes of private writable memory that the kernel counts against the limit."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no VmData")
