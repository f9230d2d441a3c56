"""What holds in every room: none imports one to its right, and nothing below cli/ knows the command line."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import mathinterp

PACKAGE = Path(mathinterp.__file__).parent
BELOW_CLI = sorted(file for file in PACKAGE.rglob("*.py") if "cli" not in file.relative_to(PACKAGE).parts)
FOREIGN = {  # flags of other programs, and of ours where a text is for people at a terminal
    "cluster/submit.py": {"--address", "--follow"},  # ray job
    "models/gguf_settings.py": {"--merge"},  # llama-gguf-split
    "models/sources.py": {"--no-deps"},  # pip
    "store/query.py": {"--store"},  # what stands at the top of views.sql
    "tuning/about.py": {"--model", "--adapter"},  # the card of a tuned model
    "versions.py": {"--porcelain"},  # git
}
ROOMS = (
    "prompts", "models", "engine", "experiments", "store", "cluster", "service",
    "tuning", "evaluation", "workflows", "report", "cli",
)  # fmt: skip
NOT_OURS = {"click", "sys.exit", "sys.stdout", "print"}


def texts(tree: ast.Module) -> Iterator[str]:
    """The string literals of a module but for docstrings and the examples of commands."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            left_out.add(id(body[0].value))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "command_examples":
            left_out |= {id(each) for each in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.value


def names(tree: ast.Module) -> Iterator[str]:
    """What a module calls and imports, as far as it is the terminal's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_nothing_below_the_command_line_names_a_flag() -> None:
    found: dict[str, set[str]] = {}
    for file in BELOW_CLI:
        written = " ".join(texts(ast.parse(file.read_text(encoding="utf-8"))))
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", written))
        if flags:
            found[str(file.relative_to(PACKAGE))] = flags
    assert found == FOREIGN


def test_nothing_below_the_command_line_prints_or_exits() -> None:
    used = {str(file.relative_to(PACKAGE)): NOT_OURS & set(names(ast.parse(file.read_text()))) for file in BELOW_CLI}
    assert not {file: found for file, found in used.items() if found}


def imported(block: list[ast.stmt]) -> Iterator[str]:
    """Dotted names that a module imports when it is imported itself."""
    for node in block:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for name in ("body", "orelse", "finalbody"):
                yield from imported(getattr(node, name, []))


def test_no_room_imports_one_to_its_right() -> None:
    upward = []
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0]
        for name in imported(ast.parse(file.read_text(encoding="utf-8")).body):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == "mathinterp" and {room, other} <= set(ROOMS) and ROOMS.index(other) > ROOMS.index(room):
                upward.append(f"{file.relative_to(PACKAGE)} imports {name}")
    assert not upward


def test_every_folder_is_a_room() -> None:
    folders = {file.relative_to(PACKAGE).parts[0] for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE}
    assert folders == set(ROOMS)
