"""A run whose small files were merged: its record lists the new, larger shards, and keeps how it was cut before.

``shards`` are those that have files now; ``cut`` is the experiment's own list; ``compacted`` says of each new shard
which of these it holds, in order, with their rows. Whatever reads a store needs ``shards`` alone. Knows records.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

Record = Mapping[str, Any]
Merged = Mapping[str, Mapping[str, int]]  # new shard -> the shards in it, in their order -> rows
SHARD = re.compile(r"\w+/[0-9]{5,18}")  # table and number
FIELDS = ("shards", "cut", "compacted", "files")  # what a recut changes in a record


def table_of(shard: str) -> str:
    """The table that a shard, by its key, is of."""
    return shard.split("/")[0]


def original_shards(record: Record) -> list[str]:
    """The shards as the experiment cut them."""
    return list(record.get("cut", record["shards"]))


def originals_in(record: Record, shards: Collection[str]) -> set[str]:
    """Of the experiment's own shards, those that the files of ``shards`` hold."""
    compacted: Merged = record.get("compacted", {})
    return {original for shard in shards for original in compacted.get(shard, (shard,))}


def place_of(record: Record, shard: str) -> tuple[str, int, int | None]:
    """The shard whose file holds one of the experiment's own, the rows before it there, and its own (None: all)."""
    for key, held in record.get("compacted", {}).items():
        if shard in held:
            before = list(held).index(shard)
            return key, sum(list(held.values())[:before]), held[shard]
    return shard, 0, None


def recut(record: Record, merged: Merged, files: Mapping[str, Any]) -> dict[str, Any]:
    """The record after files were merged; ``files`` has the entries of the new ones."""
    compacted: Merged = record.get("compacted", {})
    gone = {shard for held in merged.values() for shard in held}
    known = {key: {old: rows for part in held for old, rows in compacted.get(part, {part: held[part]}).items()}
             for key, held in merged.items()}  # fmt: skip
    compacted = {key: held for key, held in compacted.items() if key not in gone} | known
    entries = {key: entry for key, entry in record["files"].items() if key not in gone}
    return _listed({**record, "cut": original_shards(record), "compacted": compacted, "files": {**entries, **files}})


def restored(record: Record, lost: Collection[str]) -> dict[str, Any]:
    """The record with the shards of merged files that are lost listed one by one again, to be computed anew."""
    compacted = {key: held for key, held in record["compacted"].items() if key not in lost}
    found = _listed({**record, "compacted": compacted})
    return found if compacted else {name: value for name, value in found.items() if name not in ("cut", "compacted")}


def _listed(record: dict[str, Any]) -> dict[str, Any]:
    """With ``shards`` as ``cut`` and ``compacted`` say."""
    holder = {shard: key for key, held in record["compacted"].items() for shard in held}
    return {**record, "shards": list(dict.fromkeys(holder.get(shard, shard) for shard in record["cut"]))}


def is_cut(record: Record) -> bool:
    """Whether the fields of a merged run fit together; those of a run that was never merged do."""
    if "cut" not in record and "compacted" not in record:
        return True
    cut, compacted = record.get("cut"), record.get("compacted")
    if not isinstance(cut, list) or not isinstance(compacted, dict) or not compacted:
        return False
    if not all(isinstance(held, dict) and held for held in compacted.values()):
        return False
    held = [shard for each in compacted.values() for shard in each]
    rows = [rows for each in compacted.values() for rows in each.values()]
    return (
        all(isinstance(shard, str) and SHARD.fullmatch(shard) for shard in (*cut, *compacted))
        and all(isinstance(count, int) and count >= 0 for count in rows)
        and len(set(held)) == len(held)
        and set(held) <= set(cut)
        and not set(compacted) & set(cut)
        and list(record["shards"]) == _listed(dict(record))["shards"]
    )


def adopt(record: dict[str, Any], stored: Record | None) -> None:
    """Take over how the stored record is cut, where files were merged, or lost, since ``record`` was read."""
    if stored is not None and stored.get("compacted") != record.get("compacted"):
        for name in FIELDS:
            record.pop(name, None)
            record |= {name: stored[name]} if name in stored else {}
