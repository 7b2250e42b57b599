"""Text and files from elsewhere (users, data, models, hosts): read within bounds, printed without control codes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator

from stoker.contract.quantities import counted

TYPE_CHECKING = False
if TYPE_CHECKING:
    import json
    from typing import Any

# The first lines of a program for `python -c`: it imports nothing from the working directory, where anybody may have put
# a json.py or a torch.py. Not the flag -P: a host's Python may be 3.10, and an empty entry of PYTHONPATH is the working
# directory's full path by now. posix, which is built in, and not os.
NOT_FROM_HERE = """import sys, posix
try: _here = posix.getcwd()
except OSError: _here = ""
sys.path[:] = [entry for entry in sys.path if entry and entry.rstrip("/") != _here.rstrip("/")]
"""

DEPTH = 64  # of nested lists and objects. A tokenizer.json has 8, a checkpoint's manifest 5
MOST_VALUES = 8_000_000  # of one JSON text: at about 60 bytes each they stay below half a gigabyte
LONGEST_NUMBER = 40  # digits. A 128-bit state of a random generator has 39
LONGEST_LINE = 64 << 20
_SMALL = 64 << 20  # the largest file that read_text and read_json take where no other limit is given

# Besides what Python calls unprintable: marks that reverse or hide the text around them (CVE-2021-42574).
_HIDING = frozenset("\u061c\u200b\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff")
# Called unprintable, yet needed: spaces that don't break a line, and the joiners of Persian, Hindi and emoji.
_NEEDED = frozenset("\u00a0\u200c\u200d\u202f\u3000")


def printable(text: str, limit: int = 0) -> str:
    """One line that a terminal only prints: control codes, line ends, broken and text-reversing characters become \\x1b and the like."""
    if limit and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        sign if (sign.isprintable() or sign in _NEEDED) and sign not in _HIDING else _escaped(sign) for sign in text
    )


def printable_lines(text: str) -> str:
    """The same of a text with several lines: ends of line and tabs stay."""
    return "\n".join("\t".join(printable(cell) for cell in line.split("\t")) for line in text.split("\n"))


def _escaped(sign: str) -> str:
    code = ord(sign)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that isn't UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return sign.encode("unicode_escape").decode() if code != 0x5C else sign


_decoders: dict[bool, json.JSONDecoder] = {}


def parse_json(text: str | bytes | bytearray, depth: int = DEPTH, unique: bool = False, most: int = MOST_VALUES) -> Any:
    """json.loads with ValueError for every bad input and deep nesting. `unique`: the same key twice is refused."""
    if not isinstance(text, str):
        if b"\0" in text:  # before it is a text, of up to four times its size: a file of holes has any
            raise ValueError("it holds zero bytes")
        text = text.decode("utf-8")  # UnicodeDecodeError is a ValueError
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark")
    containers = text.count("[") + text.count("{")
    if containers + text.count(",") > most:
        raise ValueError(f"more than {counted(most, 'value')}")
    try:
        found = _decoder(unique).decode(text)
    except RecursionError:
        raise ValueError(f"nested more than {depth} levels deep") from None
    if containers > depth and deeper_than(found, depth):
        raise ValueError(f"nested more than {depth} levels deep")
    return found


def _decoder(unique: bool) -> json.JSONDecoder:
    """Made once: json.loads makes one at every call, which takes as long as a small text."""
    known = _decoders.get(unique)
    if known is None:
        import json

        hook = _each_key_once if unique else None
        known = _decoders[unique] = json.JSONDecoder(parse_int=_short_integer, object_pairs_hook=hook)
    return known


def json_text(found: Any) -> str:
    """Indented JSON: characters as they are, but escaped where a terminal would act on one of them."""
    import json

    text = json.dumps(found, indent=1, ensure_ascii=False)
    return text if printable_lines(text) == text else json.dumps(found, indent=1)


def _short_integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {printable(twice, 80)} appears twice")
    return found


def deeper_than(found: Any, depth: int) -> bool:
    """Level by level, so that the answer needs no recursion."""
    level: list[Any] = [found]
    for _ in range(depth + 1):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(parent: Any) -> Iterator[Any]:
    if isinstance(parent, dict):
        yield from (value for value in parent.values() if isinstance(value, (dict, list)))
    elif isinstance(parent, list):
        yield from (value for value in parent if isinstance(value, (dict, list)))


def within(found: Any, room: int, longest: int = 0) -> Any:
    """A JSON value cut to about so many characters (64 more per value and key): the rest is left out. `longest`: of a text."""
    return _within(found, [room], longest or room)


def _within(found: Any, room: list[int], longest: int) -> Any:
    room[0] -= 64
    if isinstance(found, str):
        kept = found[: max(min(room[0], longest), 0)]
        if len(kept) < len(found):  # not within a word: half a secret is not recognized as one
            kept = kept[: max(kept.rfind(" "), kept.rfind("\n"), 0)] or kept
        room[0] -= len(kept)
        return kept
    if isinstance(found, dict):
        fitting: dict[str, Any] = {}
        for key, value in found.items():
            room[0] -= 64 + len(key)
            if room[0] <= 0:
                break
            fitting[key[:longest]] = _within(value, room, longest)
        return fitting
    if isinstance(found, (list, tuple)):
        items = []
        for item in found:
            if room[0] <= 0:
                break
            items.append(_within(item, room, longest))
        return items
    return found


def open_regular(path: str | os.PathLike[str], dir_fd: int | None = None, follow: bool = True) -> int:
    """A descriptor for reading, of a regular file only. A FIFO would block for ever, and a device has no end."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=dir_fd)
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, f"is {kind_of(mode)}, not a regular file", os.fspath(path))
    return handle


def stored_size(path: str | os.PathLike[str]) -> int:
    """Bytes of a regular file without its holes: a file of holes has any size, and an archive of a few KB unpacks to it. What a
    file may take is in proportion to this. OSError: there is none.
    """
    try:
        handle = open_regular(path)
    except OSError:  # whoever reads it says why
        return os.stat(path).st_size
    size = end = 0
    try:
        while True:
            begin = os.lseek(handle, end, os.SEEK_DATA)
            end = os.lseek(handle, begin, os.SEEK_HOLE)
            size += end - begin
    except OSError as problem:  # no data behind it; or a file system that knows of no holes
        return size if problem.errno == errno.ENXIO else os.fstat(handle).st_size
    finally:
        os.close(handle)


def open_below(root: str, path: str) -> int:
    """As open_regular, of `path` below `root`: no link is followed, neither the file nor a folder on the way to it."""
    folder = os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        *folders, name = path.split("/")
        for step in folders:
            inner = os.open(step, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return open_regular(name, dir_fd=folder, follow=False)
    finally:
        os.close(folder)


_HUB_ENTRIES = (
    "models--",
    "datasets--",
    "spaces--",
)  # in its cache: ENTRY/snapshots/REVISION/FILE -> ../../blobs/DIGEST


def hub_blobs(folder: str) -> Iterator[str]:
    """Where links of a folder of the hub's cache may lead. `blobs` that is a link itself leads elsewhere, and does not count."""
    parts = folder.split(os.sep)
    for place, (name, inner) in enumerate(itertools.pairwise(parts)):
        if name.startswith(_HUB_ENTRIES) and inner == "snapshots":
            yield os.sep.join([*parts[: place + 1], "blobs"])


def open_inside(path: str | os.PathLike[str]) -> int:
    """As open_regular, of a file in a folder that somebody else packed: a link may lead to another file of that very folder, or
    to one of the blobs of the hub's cache. Elsewhere it may lead to anything of our own (.git/config, say), which would
    then be copied for others to read.
    """
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        handle = open_regular(os.path.basename(path), dir_fd=folder)
        link = os.stat(os.path.basename(path), dir_fd=folder, follow_symlinks=False)
        # Of what is open, whatever the names mean by now.
        home, real = (os.readlink(f"/proc/self/fd/{number}") for number in (folder, handle))
        target = os.fstat(handle)
    finally:
        os.close(folder)
    same = os.path.dirname(real) == home and (not stat.S_ISLNK(link.st_mode) or link.st_uid == target.st_uid)
    if same or os.path.dirname(real) in hub_blobs(home):
        return handle
    os.close(handle)
    why = f"is a link that leads out of its folder, to {printable(real, 200)}: copy that file there if it belongs there"
    raise OSError(errno.ELOOP, why, os.fspath(path))


def open_lock_file(path: str) -> int:
    """A lock file, open for writing, made where there is none: regular, with one name. A link would lead elsewhere.

    For its owner alone: whoever can open a file, if only to read it, can lock it and keep its owner out.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink != 1:
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file with one name", path)
    if about.st_mode & 0o077 and about.st_uid == os.geteuid():  # an earlier version's
        with contextlib.suppress(OSError):  # a file system without modes
            os.fchmod(handle, 0o600)
    return handle


def kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a block device",
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
    }
    return kinds.get(stat.S_IFMT(mode), "no file")


def read_bytes(path: str | os.PathLike[str], limit: int = _SMALL, *, inside: bool = False) -> bytes:
    """All of a small regular file; `inside`: as open_inside. OSError says what is wrong with it."""
    with os.fdopen(open_inside(path) if inside else open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"is larger than {limit >> 20} MiB", os.fspath(path))
    return data


def read_text(
    path: str | os.PathLike[str], limit: int = _SMALL, errors: str = "strict", *, inside: bool = False
) -> str:
    """The same as text; ValueError: it is not UTF-8."""
    return read_bytes(path, limit, inside=inside).decode("utf-8", errors)


def read_json(path: str | os.PathLike[str], limit: int = _SMALL, *, inside: bool = False) -> Any:
    return parse_json(read_bytes(path, limit, inside=inside))


def lines_of(path: str | os.PathLike[str], longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Of a regular file, with their ends. ValueError: one is longer than that."""
    with os.fdopen(open_regular(path), "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(longest + 1), b""), 1):
            if len(line) > longest:
                raise ValueError(f"line {number} is longer than {longest >> 20} MB")  # its end may never come
            yield line


def last_lines(path: str | os.PathLike[str], size: int, most: int) -> tuple[list[bytes], bool]:
    """Of a regular file's last `size` bytes the last `most` lines, without their ends; and whether that is all of it."""
    with os.fdopen(open_regular(path), "rb") as file:
        skipped = max(0, os.fstat(file.fileno()).st_size - size)
        file.seek(skipped)
        lines = file.read(size).rsplit(b"\n", most + 1)  # the last is what follows the last end
    whole = not skipped and len(lines) <= most + 1
    return lines if whole else lines[1:], whole


def json_lines(path: str, longest: int = LONGEST_LINE) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lines that hold an object, each with it; not one that is being written, or that a crash tore. Nothing where there is
    no file. OSError: a named pipe or a device; ValueError: a line without end.
    """
    if not os.path.exists(path):
        return
    for raw in lines_of(path, longest):
        if raw.lstrip()[:1] != b"{":
            continue  # no object; of millions of empty lines none is worth a look
        line = raw.decode("utf-8", "replace")
        try:
            found = parse_json(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield line, found


def text_lines(path: str | os.PathLike[str], longest: int = 1 << 20) -> Iterator[str]:
    """The same as UTF-8 text, without a byte-order mark: what csv.reader takes. ValueError as above, or no UTF-8."""
    for number, line in enumerate(lines_of(path, longest)):
        yield (line if number else line.removeprefix(b"\xef\xbb\xbf")).decode()


def is_count(text: str) -> bool:
    """Whether int() may read it: str.isdigit is true of `²` and of ten thousand nines, and int() fails on both."""
    return text.isascii() and text.isdigit() and len(text) <= 18
