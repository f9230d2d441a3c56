"""Ray's session where the temporary folder is long, missing or not to be written to: a short one, or one line."""

import io
import os
import stat
import tempfile
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner
from ray._private.utils import validate_socket_filepath

from mathinterp.cli.main import main
from mathinterp.cluster import temporary
from mathinterp.cluster.submit import submit
from mathinterp.cluster.temporary import LONGEST, SESSION, ray_folder, usable_folder
from mathinterp.errors import UserError
from mathinterp.store import Store


@pytest.fixture
def short(monkeypatch):
    """A short folder in which those of users are made, instead of /tmp; none is asked for by the environment."""
    folder = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setattr(temporary, "SHORT", (folder,))
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    return Path(folder)


def deep(folder: Path, length: int) -> Path:
    """A folder below ``folder`` whose name has so many bytes."""
    place = folder / ("x" * (length - len(str(folder)) - 1))
    place.mkdir()
    return place


def test_the_limit_is_rays_own():
    validate_socket_filepath("x" * LONGEST + SESSION)
    with pytest.raises(OSError, match="AF_UNIX"):
        validate_socket_filepath("x" * (LONGEST + 1) + SESSION)


@pytest.mark.parametrize("name", ["TMPDIR", "RAY_TMPDIR"])
def test_a_long_folder_gives_way_to_a_short_one_of_the_users_own(name, short, monkeypatch, caplog):
    monkeypatch.setenv(name, str(deep(short, LONGEST)))
    assert usable_folder() is None
    monkeypatch.setenv(name, str(deep(short, LONGEST + 1)))
    own = usable_folder()
    assert own == str(short / f"mathinterp-{os.getuid()}")
    assert stat.S_IMODE(os.stat(own).st_mode) == 0o700
    (told,) = caplog.messages
    assert told == (
        f"{name} '{os.environ[name]}' is too long for Ray's sockets ({LONGEST + 1} bytes, at most {LONGEST}), so Ray's "
        f"session is in {own}"
    )
    assert usable_folder() == own  # and again


def test_a_folder_of_wide_letters_is_measured_in_bytes(short, monkeypatch):
    place = short / ("ü" * ((LONGEST - len(str(short))) // 2 + 1))
    place.mkdir()
    assert len(str(place)) <= LONGEST < len(os.fsencode(place))
    monkeypatch.setenv("TMPDIR", str(place))
    assert usable_folder() is not None


@pytest.mark.parametrize("what", ["absent", "file"])
def test_a_folder_that_is_none_gives_way_and_is_not_made(what, short, monkeypatch, caplog):
    place = short / what
    if what == "file":
        place.touch()
    monkeypatch.setenv("TMPDIR", str(place))
    assert usable_folder() is not None
    assert "is not a folder that exists, so Ray's session is in" in caplog.text
    assert not place.is_dir()


def test_a_folder_that_may_not_be_written_gives_way(short, monkeypatch, caplog):
    monkeypatch.setenv("TMPDIR", "/proc")  # not even by root
    monkeypatch.setattr(os, "access", lambda place, mode: not str(place).startswith("/proc"))
    assert usable_folder() is not None
    assert "TMPDIR '/proc' may not be written to" in caplog.text


@pytest.mark.parametrize("what", ["a link", "a file", "open to all"])
def test_what_somebody_left_in_place_of_the_users_own_folder_is_not_used(what, short, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short / "absent"))
    own = short / f"mathinterp-{os.getuid()}"
    if what == "a link":
        own.symlink_to(tempfile.mkdtemp(dir=short))
    elif what == "a file":
        own.touch()
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(UserError, match=rf"set RAY_TMPDIR to a folder of at most {LONGEST} bytes"):
        usable_folder()


def test_the_environment_is_as_before_afterwards(short, monkeypatch):
    with ray_folder():
        assert "RAY_TMPDIR" not in os.environ  # nothing was wrong
    monkeypatch.setenv("RAY_TMPDIR", str(short / "absent"))
    with ray_folder():
        assert os.environ["RAY_TMPDIR"] == str(short / f"mathinterp-{os.getuid()}")
    assert os.environ["RAY_TMPDIR"] == str(short / "absent")


def test_no_place_for_temporary_files_at_all_is_one_line(monkeypatch):
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(UserError, match=r"no temporary folder can be written .* set TMPDIR to one that can"):
        submit("ray_jobs/head_scan.py", [], "http://127.0.0.1:1", output=io.StringIO(), announce=print)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    done = CliRunner().invoke(main, ["evaluate", "--tasks", "two_digit,one_digit", "--limit", "2"])
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.ray
@pytest.mark.own_ray
def test_a_scan_runs_under_a_long_temporary_folder(short, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(deep(short, 120)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    store = str(tmp_path / "store")
    asked = ["scan", "heads", "--heads", "0.0", "--limit", "4", "--store", store, "--replicas", "1"]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 0, done.output
    assert len([line for line in done.stderr.splitlines() if "too long for Ray's sockets" in line]) == 1
    assert Store(store).rows("SELECT status FROM runs") == [{"status": "finished"}]
    assert not ray.is_initialized()
    assert list((short / f"mathinterp-{os.getuid()}" / "ray").glob("session_*"))
