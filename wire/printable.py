"""What others wrote, as it may stand in a log line, on a terminal, or in an error."""

__all__ = ["quoted", "reason", "shown"]

# Python writes no longer integer in decimal.
_DECIMAL_BITS = 10_000


def shown(text: object, limit: int = 100) -> str:
    """Return a text as one line that no terminal obeys, cut after ``limit`` characters.

    Whatever is not printable (control and direction characters, line breaks, lone surrogates) is escaped as
    Python escapes it.

    Examples
    --------
    >>> shown("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    head = str(text)[: limit + 1]
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head), limit)


def quoted(value: object, limit: int = 100) -> str:
    """Return ``repr(value)`` as ``shown`` would; an integer too long for decimal digits is hexadecimal."""
    if isinstance(value, str):
        return _cut(repr(value[: limit + 1]), limit)
    long = isinstance(value, int) and value.bit_length() > _DECIMAL_BITS
    return shown(hex(value) if long else repr(value), limit)  # type: ignore[arg-type]


def reason(error: BaseException, *, file: bool = True) -> str:
    """Return what an error says; the system's without its number, after the file that it is of.

    Parameters
    ----------
    error : BaseException
        The error.
    file : bool (default: True)
        Name the file; False where the sentence does already.

    Examples
    --------
    >>> reason(FileNotFoundError(2, "No such file or directory", "a.toml"))
    'a.toml: No such file or directory'
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if file and error.filename is not None else error.strerror


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else line[:limit] + "…"
