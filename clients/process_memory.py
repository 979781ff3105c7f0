"""How much memory a message may take: a bound on what its process allocates while it is handled.

The bound is the kernel's, RLIMIT_DATA: private writable memory, anonymous mappings too (Linux 4.7 and later).
Files that are mapped to be read and a GPU's memory do not count; the stacks of threads do.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_limit_memory", "is_out_of_memory", "limited_memory"]

_STATUS = Path("/proc/self/status")


def can_limit_memory() -> bool:
    """Return whether this system bounds a process's memory as is needed here: Linux alone does."""
    return sys.platform == "linux" and _STATUS.exists()


@contextmanager
def limited_memory(most: int | None) -> Iterator[None]:
    """Let the process allocate so many bytes beside those that it has; more raises MemoryError in the block.

    The limit that was there comes back at the end, and is kept where it is the lower one.

    - ``most``: Bytes, >= 1; None for no limit.

    Raises
    ------
    OSError
        If there is no such limit on this system.
    """
    if most is None:
        yield
        return
    if not can_limit_memory():
        raise OSError("the memory of a process can be limited only on Linux")
    # Windows has no such module.
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [one for one in (soft, hard, _allocated() + most) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that memory was refused; torch has words for it, and no class."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _allocated() -> int:
    """Return the process's private writable memory, in bytes, as the kernel holds it against the limit."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{_STATUS} has no VmData")
