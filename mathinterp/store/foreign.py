"""Files in the folders of a store that nothing of this package wrote: named by check, never read, never deleted.

Knows names alone.
"""

import re
from collections.abc import Iterable

from mathinterp.store.files import StoreFiles
from mathinterp.store.integrity import SEAL
from mathinterp.store.manifest import RUN_ID
from mathinterp.store.survey import COMPACTING, PROMPT_FILE, SHARD_FILE

WHY = "nothing that mathinterp wrote; move it elsewhere if it is yours"
_RECORD = re.compile(rf"runs/{RUN_ID.pattern}\.json")
_MARKER = re.compile(rf"[^/]+/run_id=[^/]+/{re.escape(COMPACTING)}")


def is_ours(name: str) -> bool:
    """Whether a file's name in the store is one that mathinterp gives; temporary ones begin with a dot."""
    own = name.rpartition("/")[2]
    if own.startswith(".") and own.endswith(".tmp"):
        return True
    patterns = (_RECORD, SHARD_FILE, _MARKER)
    return any(each.fullmatch(name) for each in patterns) or bool(PROMPT_FILE.fullmatch(name.removesuffix(SEAL)))


def foreign_in(files: StoreFiles, folders: Iterable[str]) -> list[str]:
    """Regular files of others below some folders; what a console makes to show a folder of an object store is none."""
    if files.local:
        found = [each for folder in folders for each in files.find(folder, "").items()]
    else:  # one listing
        below = tuple(f"{folder}/" for folder in folders)
        found = [each for each in files.find("", "").items() if each[0].startswith(below)]
    return [name for name, version in found if not (version.odd or name.endswith("/") or is_ours(name))]
