"""A neuron scan's rows on tiny models, without Ray: for tests of the scan and of its views."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mathinterp.cluster.replica import check_rows
from mathinterp.experiments.base import Subject
from mathinterp.experiments.neurons import Neurons
from mathinterp.models.anatomy import Anatomy
from mathinterp.store import Store
from tests.made_prompts import PROMPTS as MADE
from tests.small_store import open_run
from tests.tiny import tiny_model


def scan_of(name: str) -> Anatomy:
    return Anatomy(tiny_model(name))


def rows_of(scan: Neurons, model: Anatomy) -> dict[str, pa.Table]:
    """Every shard's rows, by table; no Ray, no store."""
    state = scan.prepare(Subject(model, MADE))
    found: dict[str, list[pa.Table]] = {}
    for shard in scan.shards(model.shape, MADE):
        found.setdefault(shard.table, []).append(scan.run(state, shard))
        check_rows(found[shard.table][-1], scan.tables[shard.table].schema, shard.key)
    return {table: pa.concat_tables(parts) for table, parts in found.items()}


def stored(folder: Path, scan: Neurons, model: Anatomy) -> Store:
    """The scan's rows in a store of their own."""
    store, rows = Store(folder), rows_of(scan, model)
    shards = [f"{table}/00000" for table in rows]
    run = open_run(store, shards, scan="neurons", parameters=scan.parameters())
    for table in rows:
        store.write_shard(run.run_id, table, 0, rows[table], {})
    run.finish()
    return store


def grid(rows: pa.Table, column: str) -> np.ndarray:
    """P x L x K of a keep_all scan's neurons."""
    values = rows.filter((pc.field("node") == "neuron") & pc.is_valid(pc.field("prompt_id")))[column].to_numpy()
    return values.reshape(3, len(MADE), -1).transpose(1, 0, 2)
