"""Runs, rows and SQL views in one folder or object store."""

from mathinterp.prompts.alignment import prompts_fingerprint
from mathinterp.store.manifest import RESULT_FORMAT, Run, run_id
from mathinterp.store.store import Store

__all__ = ["RESULT_FORMAT", "Run", "Store", "prompts_fingerprint", "run_id"]
