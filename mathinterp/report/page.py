"""The page of a store's runs, written into a folder: ``index.html`` opens by double-click, offline."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mathinterp.errors import UserError
from mathinterp.experiments.figures import save
from mathinterp.local_files import whole_file, whole_folder
from mathinterp.report.contents import files
from mathinterp.report.runs import Shown, find
from mathinterp.report.runs import figure_of as draw
from mathinterp.store import Store
from mathinterp.text import file_name

__all__ = ["Report", "draw", "write_report"]


@dataclass(frozen=True)
class Report:
    """What was written: the page, how many runs it shows, and figures beside it where they were asked for."""

    page: Path
    runs: int
    figures: list[Path] = field(default_factory=list)


def write_report(
    store: Store,
    out: Path,
    run_ids: Sequence[str] = (),
    compare: tuple[str, str] | None = None,
    *,
    pictures: bool = False,
) -> Report:
    """Write ``out``/index.html and what it needs, ``out``/assets, which is replaced as a whole.

    A link in ``out`` is replaced and its target left alone.

    Args:
        run_ids, compare: see ``contents``.
        pictures: also each figure as PNG and SVG beside the page.

    Raises:
        UserError: as ``contents``, or ``out`` cannot be written.
    """
    with store.held():
        found = find(store, run_ids, compare or ())
        if not found.shown:
            raise UserError(f"{store.url} has no finished run that can be drawn; run a scan first")
        made = dict(files(store, found, compare))  # all of it before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
        index = made.pop("index.html")
        _write_assets(out / "assets", made)
        drawn = _pictures(out, found.shown) if pictures else []
        with whole_file(out / "index.html") as temporary:
            temporary.write_bytes(index)
    except OSError as error:
        raise UserError(f"`out` {out} cannot be written: {error.strerror}; name another folder") from error
    return Report(out / "index.html", len(found.shown), drawn)


def _write_assets(assets: Path, made: dict[str, bytes]) -> None:
    if assets.is_symlink():
        assets.unlink()
    with whole_folder(assets) as folder:
        for name, content in made.items():
            file = folder / Path(name).relative_to(assets.name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)


def _pictures(out: Path, shown: Iterable[Shown]) -> list[Path]:
    figures = [(run, name, figure) for run in shown for name, figure in run.figures.items()]
    return [path for run, name, figure in figures for path in save(figure, out / _picture_name(run, name))]


def _picture_name(run: Shown, name: str) -> str:
    return file_name("-".join([run.run["scan"], run.run["run_id"], *([name] if name else [])]))
