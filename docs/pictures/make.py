"""The pictures of README and docs: real output of real commands on the bundled model, made again by

    python docs/pictures/make.py                # all of them, in some minutes
    python docs/pictures/make.py runs sql       # these; what they need is computed first
    python docs/pictures/make.py runs --store results    # the runs of that store need not be computed

Terminals are SVG (rich), charts SVG (Altair). The screenshot of the page needs playwright and chromium; without them
it is left out.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 118  # columns
LARGEST = 150_000  # bytes of a picture
MATHINTERP = [sys.executable, "-m", "mathinterp"]
TOP_HEADS = (
    "SELECT layer, head, drop, drop_low, drop_high, q_value FROM head_effects JOIN latest_runs USING (run_id)"
    " WHERE operation = 'all' ORDER BY drop DESC LIMIT 5"
)


def scan_heads(folder: Path) -> None:
    """The first scan: its progress half-way, the papers' table and what is sure."""
    progress, said = in_terminal(folder, "scan", "heads")
    parts = [progress, "", *until_blank(said, "Accuracy (%)"), dim("..."), *beginning(said, r"\d+ of \d+ heads cost")]
    draw("scan_heads", "mathinterp scan heads", parts)


def sql(folder: Path) -> None:
    """A query."""
    finished_scan(folder)
    _, said = in_terminal(folder, "sql", TOP_HEADS)
    draw("sql", f'mathinterp sql "{TOP_HEADS}"', said)


def runs(folder: Path) -> None:
    """What is in a store."""
    finished_scan(folder)
    import mathinterp as mi

    prompts = mi.prompts("pairs", limit=32)
    mi.run(mi.experiments.Attention(), "bundled", prompts, store=str(folder / "results"), progress=False)
    _, said = in_terminal(folder, "runs", "list", width=140)
    draw("runs", "mathinterp runs list", said, width=140)


def heads(folder: Path) -> None:
    """The figure of the head scan."""
    finished_scan(folder)
    figure_of(folder, "Heads", "two_digit").save(HERE / "heads.svg")


def operand_map(folder: Path) -> None:
    """The figure of the operand scan; a PNG of few colours, as it has tens of thousands of cells."""
    from PIL import Image

    figure_of(folder, "OperandMap", "operands_add").save(folder / "operand_map.png")
    with Image.open(folder / "operand_map.png") as drawn:
        drawn.convert("RGB").quantize(64).save(HERE / "operand_map.png", optimize=True)


def report(folder: Path) -> None:
    """The page in chromium: every head on every prompt."""
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        chromium = None
    if chromium is None:
        print("report: left out, it takes playwright and chromium", file=sys.stderr)
        return
    finished_scan(folder)
    quietly(folder, "report", "--out", str(folder / "page"))
    switches = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    switches += ["--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=switches)
        page = browser.new_page(viewport={"width": 1300, "height": 900}, color_scheme="light")
        page.goto((folder / "page" / "index.html").as_uri())
        page.locator("nav > ul > li", has_text="heads").get_by_role("link").first.click()
        page.locator(".view:visible .grid > .open").click()
        page.locator(".view:visible .names button").first.click()
        page.locator(".view:visible .grid").evaluate("grid => scrollBy(0, grid.getBoundingClientRect().top - 70)")
        page.locator(".where").evaluate("where => { where.textContent = 'results'; }")
        page.screenshot(path=HERE / "report.png")
        browser.close()


PICTURES: dict[str, Callable[[Path], None]] = {
    "scan_heads": scan_heads, "sql": sql, "runs": runs, "heads": heads, "operand_map": operand_map,
    "report": report,
}  # fmt: skip


def finished_scan(folder: Path) -> None:
    """The head scan; does nothing where it is finished."""
    quietly(folder, "scan", "heads")


def figure_of(folder: Path, experiment: str, prompts: str) -> Any:
    """The figure of a run on the bundled model, which is computed here where it is not in the store."""
    import mathinterp as mi

    asked, store = getattr(mi.experiments, experiment)(), str(folder / "results")
    figure = mi.run(asked, "bundled", mi.prompts(prompts), store=store, progress=False).figure()
    assert figure is not None
    return figure


def quietly(folder: Path, *words: str) -> None:
    """Run a command; what it says is shown where it fails."""
    done = subprocess.run([*MATHINTERP, *words], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)


def in_terminal(folder: Path, *words: str, width: int = WIDTH) -> tuple[str, list[str]]:
    """The last line of progress before the middle (empty: there was none), and the lines that stay, with colours."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen([*MATHINTERP, *words], cwd=folder, env=environment, stdout=its, stderr=its, stdin=its)
    os.close(its)
    screen, progress = Screen(), ""
    while True:
        try:
            read = os.read(mine, 65536)
        except OSError:  # the command has ended
            break
        screen.write(read.decode(errors="replace"))
        for line in screen.lines:
            done = re.search(r"(\d+)% done", plain(line))
            progress = line if done and int(done[1]) <= 50 else progress
    os.close(mine)
    if process.wait() != 0:
        raise SystemExit("\n".join(map(plain, screen.lines)))
    return progress, [line.rstrip() for line in screen.lines]


class Screen:
    """As much of a terminal as progress bars need: lines that are written over."""

    def __init__(self) -> None:
        self.lines, self.row = [""], 0

    def write(self, text: str) -> None:
        """Text with control characters, as a command writes it."""
        for part in re.split(r"(\r\n|\n|\r|\x1b\[\d*A|\x1b\[2K|\x1b\[\?\d+[lh])", text):
            if part in ("\n", "\r\n"):
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part.endswith("A") and part.startswith("\x1b["):
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part != "\r" and not part.startswith("\x1b[?"):
                self.lines[self.row] += part


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m"


def beginning(lines: list[str], pattern: str) -> list[str]:
    """The paragraph that begins so, as far as it is one sentence."""
    start = next(index for index, line in enumerate(lines) if re.match(pattern, plain(line)))
    end = next(index for index in range(start, len(lines)) if plain(lines[index]).rstrip().endswith("."))
    return lines[start : end + 1]


def until_blank(lines: list[str], begins: str) -> list[str]:
    """The table of that title."""
    start = next(index for index, line in enumerate(lines) if plain(line).startswith(begins))
    end = next(index for index in range(start + 2, len(lines)) if not re.match(r"[a-z]+ .*\d$", plain(lines[index])))
    return lines[start:end]


def draw(name: str, command: str, lines: list[str], width: int = WIDTH) -> None:
    """A terminal with a command and what it said."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("$ ", style="bold green") + Text(command, style="bold"))
    for line in lines:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title="mathinterp", unique_id=name)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # those ask a server for the font
    (HERE / f"{name}.svg").write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PICTURES)))
@click.option("--store", type=click.Path(exists=True, path_type=Path), help="Take finished runs from here.")
def main(names: tuple[str, ...], store: Path | None) -> None:
    """Make the pictures named, or all."""
    with TemporaryDirectory() as folder:
        if store is not None:
            shutil.copytree(store, Path(folder) / "results")
        for name in names or PICTURES:
            PICTURES[name](Path(folder))
    for file in HERE.glob("*.*g"):
        if file.stat().st_size > LARGEST:
            raise SystemExit(f"{file.name} has {file.stat().st_size:,} bytes; a picture may have {LARGEST:,}")


if __name__ == "__main__":
    main()
