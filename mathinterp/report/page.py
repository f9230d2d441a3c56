"""The page of a store's runs, written into a folder: ``index.html`` opens by double-click, offline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mathinterp.errors import UserError
from mathinterp.local_files import whole_file, whole_folder
from mathinterp.report.contents import contents
from mathinterp.report.runs import figure_of as draw
from mathinterp.store import Store

__all__ = ["Report", "draw", "write_report"]


@dataclass(frozen=True)
class Report:
    """Files that were written: the page, and figures beside it as PNG and SVG where they were asked for."""

    page: Path
    figures: list[Path] = field(default_factory=list)


def write_report(
    store: Store, out: Path, run_ids: Sequence[str] = (), compare: tuple[str, str] | None = None
) -> Report:
    """Write ``out``/index.html and what it needs, ``out``/assets, which is replaced as a whole.

    A link in ``out`` is replaced and its target left alone.

    Args:
        run_ids, compare: see ``contents``.

    Raises:
        UserError: as ``contents``, or ``out`` cannot be written.
    """
    files = list(contents(store, run_ids, compare))  # all of it before anything is written
    try:
        out.mkdir(parents=True, exist_ok=True)
        assets, page = out / "assets", out / "index.html"
        if assets.is_symlink():
            assets.unlink()
        with whole_folder(assets) as folder:
            for name, content in files:
                if name == page.name:
                    index = content
                    continue
                file = folder / Path(name).relative_to("assets")
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
        with whole_file(page) as temporary:
            temporary.write_bytes(index)
    except OSError as error:
        raise UserError(f"`out` {out} cannot be written: {error.strerror}; name another folder") from error
    return Report(page)
