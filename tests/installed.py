"""Packages built from a folder of source and installed into a folder of their own; no network, nothing of this venv."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NOT_SOURCE = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")


def install(source: Path, target: Path, names: Iterable[str]) -> None:
    """Build ``names`` of the project in ``source`` as a wheel, on a copy, and install it alone into ``target``."""
    copy = target.parent / f"{target.name}-source"
    copy.mkdir()
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, copy / name, ignore=NOT_SOURCE)
        else:
            shutil.copy(source / name, copy / name)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
