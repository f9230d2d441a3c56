"""Text from stored records and files, made safe to show and to put into SQL."""

import re

SHOWN = 300  # characters of a text in Markdown
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""``text`` with what a terminal would obey written out (``\x1b``); line breaks and tabs stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """``text`` on one line, printable; it cannot end an SQL comment."""
    return printable(" ".join(text.split()))


def quoted(text: str) -> str:
    """``text`` as a string of SQL, for where a parameter cannot stand."""
    return "'" + text.replace("'", "''") + "'"


def counted(count: int, noun: str) -> str:
    """A number and what it counts: 1 shard, 2,000 shards."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def file_name(text: str) -> str:
    """``text`` with what a file's name may not hold replaced."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in text)


def visible(name: str) -> str:
    """A file's name on one line, and without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def escaped(text: object, longest: int = SHOWN) -> str:
    """Text on one line that Markdown (CommonMark, GitHub's, Pandoc's) shows as it is: no markup, link or HTML."""
    line = one_line(str(text))
    if len(line) > longest:
        line = f"{line[:longest]}… ({len(line):,} characters)"
    line = re.sub(r"([\\`*_\[\]<>|~$^&#@])", r"\\\1", line)
    line = re.sub(r"(?<=[A-Za-z]):(?=//)|(?<=www)\.", lambda found: "\\" + found[0], line)
    return re.sub(r"^(\d+)([.)])(?=\s|$)|^([-+=])", lambda found: _first(found), line)


def _first(found: re.Match[str]) -> str:
    """What would begin a list or a heading."""
    return f"{found[1]}\\{found[2]}" if found[1] else f"\\{found[3]}"
