"""Prompts as rows: the tables ``prompts`` and ``answer_tokens``, and the fingerprint that ties runs to them.

Knows tokenized prompts; knows nothing about files or models.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa

from mathinterp.prompts.prompt import TokenizedPrompt
from mathinterp.store.schema import TABLES


def prompts_fingerprint(prompts: Sequence[TokenizedPrompt]) -> str:
    """12 hex digits over texts, answers, token ids and scored positions, in order.

    Two tokenizers that cut the same prompts differently give two fingerprints: their rows cannot be mixed.
    """
    canonical = json.dumps([asdict(prompt) for prompt in prompts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def prompt_rows(prompts: Sequence[TokenizedPrompt]) -> pa.Table:
    """One row per prompt."""
    schema = TABLES["prompts"].schema
    return pa.Table.from_pylist(
        [{name: getattr(prompt.prompt, name) for name in schema.names} for prompt in prompts], schema=schema
    )


def answer_token_rows(prompts: Sequence[TokenizedPrompt]) -> pa.Table:
    """One row per scored answer token."""
    rows = [
        {
            "prompt_id": prompt.prompt.prompt_id,
            "position": token.position,
            "token_id": token.token_id,
            "token": token.token,
            "kind": token.kind,
            "carry_class": token.carry_class,
        }
        for prompt in prompts
        for token in prompt.scored
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["answer_tokens"].schema)
