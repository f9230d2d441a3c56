"""Packages built from a folder of source and installed into a folder of their own; no network, nothing of this venv."""

import shutil
import subprocess
import sys
from pathlib import Path

NOT_SOURCE = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")


def install(source: Path, target: Path) -> None:
    """Build the project in ``source`` as a wheel, on a copy, and install it alone into ``target``."""
    copy = target.parent / f"{target.name}-source"
    shutil.copytree(source, copy, ignore=NOT_SOURCE)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options, str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
