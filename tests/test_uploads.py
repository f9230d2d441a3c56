"""A working directory that no job could have is refused before anything is packed."""

import io
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from mathinterp.cli.main import main
from mathinterp.cluster import submit as submitting
from mathinterp.cluster import uploads
from mathinterp.cluster.submit import submit
from mathinterp.errors import UserError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small working directory."""
    (tmp_path / "jobs").mkdir()
    for name in ("jobs/job.py", "jobs/helper.py", "marker.py"):
        (tmp_path / name).write_text("")
    return tmp_path


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What submit says of a folder that is never packed."""

    def packed(*given: object, **more: object) -> None:
        raise AssertionError("it was packed")

    monkeypatch.setattr(submitting, "ZipFile", packed)
    with pytest.raises(UserError) as error:
        submit("scan heads", [], "http://127.0.0.1:1", working_dir=folder, output=io.StringIO(), announce=print)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_far_too_large_is_refused_before_it_is_packed(project, monkeypatch):
    with open(project / "disk.img", "wb") as image:
        image.truncate(2**40)
    assert "holds more than a job can send (1024.0 GiB in the first 2 files, among them disk.img" in refused(
        project, monkeypatch
    )
    os.truncate(project / "disk.img", 2**28)
    assert "zips to 256.0 MiB, Ray takes less than 100.0 MiB; the largest files are disk.img" in refused(
        project, monkeypatch
    )
    (project / "disk.img").unlink()
    monkeypatch.setattr(uploads, "MOST_FILES", 2)
    assert "in the first 3 files" in refused(project, monkeypatch)


def test_a_folder_that_cannot_be_read_is_told_in_one_line(project, monkeypatch):
    listing = Path.iterdir

    def denied(folder: Path):
        if folder.name == "jobs":
            raise PermissionError(13, "Permission denied", str(folder))
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    assert f"'{project}/jobs' cannot be read (Permission denied)" in refused(project, monkeypatch)


def test_the_disk_is_no_working_directory(monkeypatch):
    """The whole way: Ray would have walked and packed all of it."""
    monkeypatch.setattr(uploads, "MOST_FILES", 1000)
    asked = ["submit", "scan heads", "--address", "http://127.0.0.1:1", "--working-dir", "/"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert "give the job's own folder as --working-dir" in done.stderr or "cannot be read" in done.stderr
