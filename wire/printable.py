"""Untrusted text made safe for logs, terminals and errors."""

import traceback
from hashlib import sha256

# Python refuses to write longer integers in decimal.
_DECIMAL_BITS = 10_000
# Bytes of a file's name, of at most 255 on most systems.
_LONGEST_NAME = 240
_MOST_LINES = 300
# Characters of a path, as Linux allows: a shortened one opens nothing.
LONGEST_PATH = 4096


def shown(text: object, limit: int = 100) -> str:
    """Return a text as one line without control characters, truncated to ``limit`` characters.

    Characters that are not printable (control and direction characters, line breaks, lone surrogates) are
    escaped as in Python.

    Examples
    --------
    >>> shown("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    head = str(text)[: limit + 1]
    return _cut("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in head), limit)


def cell(text: str) -> str:
    """Return a text as a cell of a table: one line that no spreadsheet takes for a formula.

    Examples
    --------
    >>> cell("=HYPERLINK(1)")
    "'=HYPERLINK(1)"
    """
    line = shown(text, 1000)
    return "'" + line if line.lstrip().startswith(("=", "+", "-", "@")) else line


def file_name(text: str) -> str:
    """Return a text as the name of one file or folder, which never leads out of its folder.

    Different texts have different names: one that cannot be a name itself gets a digest.

    Examples
    --------
    >>> file_name("tau1=2, topology=ring")
    'tau1=2, topology=ring'
    >>> file_name("../a b/c")
    '_.._a b_c~b716564e103b6e2ee9c795a8aff60b3a'
    """
    name = "".join(c if c.isalnum() or c in " ._-=+,()" else "_" for c in text)
    if name == text and name[:1] not in ("", ".") and len(name.encode()) <= _LONGEST_NAME:
        return name
    head = name.encode()[: _LONGEST_NAME - 40].decode(errors="ignore")
    return f"_{head}~{sha256(text.encode(errors='surrogatepass')).hexdigest()[:32]}"


def quoted(value: object, limit: int = 100) -> str:
    """Return ``repr(value)`` like ``shown``; an integer too long for decimal digits is hexadecimal."""
    if isinstance(value, str):
        return _cut(repr(value[: limit + 1]), limit)
    long = isinstance(value, int) and value.bit_length() > _DECIMAL_BITS
    return shown(hex(value) if long else repr(value), limit)  # type: ignore[arg-type]


def reason(error: BaseException, *, file: bool = True) -> str:
    """Return an error's message; for a system error its file and description, without its number.

    Parameters
    ----------
    error : BaseException
        The error.
    file : bool (default: True)
        Whether to name the file.

    Examples
    --------
    >>> reason(FileNotFoundError(2, "No such file or directory", "a.toml"))
    'a.toml: No such file or directory'
    """
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if file and error.filename is not None else error.strerror


def traced(error: BaseException) -> str:
    """Return an error's traceback, in lines without control characters, of which the last ones are kept."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join(shown(line, 1000) for line in lines[-_MOST_LINES:])


def _cut(line: str, limit: int) -> str:
    return line if len(line) <= limit else line[:limit] + "…"
