"""Prompts as people have them at hand: a set's name, a file, pairs, dicts or a data frame.

Knows what a user may get wrong in a row; knows nothing about tokenizers or models. The fields are those of a prompt
file. Any other column is kept beside the prompts and can be queried (``prompt_columns``); it never changes what a run
is. A field that only looks misspelled is refused.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from mathinterp.errors import UserError, did_you_mean
from mathinterp.gates import shortened
from mathinterp.prompts.arithmetic import PROMPT_SETS
from mathinterp.prompts.files import prompts_of_records, read_rows
from mathinterp.prompts.json_lines import as_json_value, exists
from mathinterp.prompts.mib import hub_records, is_hub_set
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.spread import even_spread
from mathinterp.prompts.word_problems import WORD_PROBLEMS, read_word_problems

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Columns = Mapping[str, Mapping[str, str]]  # prompt_id -> name of a further column -> its value as text


@dataclass(frozen=True)
class Prompts(Sequence[Prompt]):
    """A sequence of prompts with a name for tables and, for each prompt, further columns."""

    items: tuple[Prompt, ...]
    label: str = "prompts"
    columns: Columns = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> "Prompts": ...

    def __getitem__(self, index: int | slice) -> "Prompt | Prompts":
        if not isinstance(index, slice):
            return self.items[index]
        return Prompts(self.items[index], self.label, self.columns)

    def __repr__(self) -> str:
        named = sorted({name for row in self.columns.values() for name in row})
        more = f", further columns {', '.join(named)}" if named else ""
        return f"<{len(self)} prompts, {self.label}{more}>"


def prompts_of(
    source: "str | Path | Iterable[Any] | pd.DataFrame | pl.DataFrame",
    *,
    limit: int | None = None,
    seed: int = 0,
    label: str | None = None,
) -> Prompts:
    """Prompts to ask a model.

    Args:
        source: a set's name ("two_digit"), a file of JSON lines or Parquet, a public file of word problems
            ("svamp:PATH"), a set of MIB on the hub ("mib-bench/arithmetic_addition"; after a colon its split), a list
            of dicts, of (text, answer) pairs or of Prompt, or a pandas or polars frame. Fields: ``text`` and
            ``answer``; optional are ``prompt_id`` (else the row's number, from 1, as in a file), ``operation``,
            ``operand_a``, ``operand_b``, ``template``, ``counterfactual``, ``separator``, ``distractor``,
            ``token_types`` and ``one_token``. Other columns are kept: ``extra`` of the view prompts. Rows of MIB
            (``prompt``, ``label``, ``random_counterfactual``) are read as pairs.
        limit: at most so many, evenly spread over operations and templates.
        seed: draws a set's operands.
        label: the prompts' name in tables; None: the set's or file's.
    Raises:
        UserError: what is wrong, naming the row: ``prompts[3]`` is the fourth.

    >>> import mathinterp as mi
    >>> mi.prompts("two_digit", limit=160)
    <160 prompts, two_digit limit=160>
    >>> mi.prompts([("3 plus 5 is", 8), ("4 plus 5 is", 9)])[1].answer
    '9'
    >>> mi.prompts([{"text": "3 plus 5 is", "answer": 8, "operation": "add", "speaker": "Ada"}])
    <1 prompts, prompts, further columns speaker>
    """
    if isinstance(source, str | Path):
        found = _named(source, seed)
        name = " ".join([str(source), *([f"limit={limit}"] if limit else []), *([f"seed={seed}"] if seed else [])])
    else:
        found, name = _of_rows(source), "prompts"
    return Prompts(tuple(even_spread(found.items, limit)), label or name, found.columns)


def _named(source: str | Path, seed: int) -> Prompts:
    name = str(source)
    kind, colon, file = name.partition(":")
    if is_hub_set(source):
        return _joined(prompts_of_records(hub_records(name)))
    if name in PROMPT_SETS:
        return Prompts(tuple(PROMPT_SETS[name].build(seed)))
    if colon and kind in WORD_PROBLEMS:
        return Prompts(tuple(read_word_problems(kind, file)))
    if not exists(source):
        raise UserError(
            f"'{shortened(name)}' is neither a prompt file that exists nor a prompt set."
            f"{did_you_mean(name, PROMPT_SETS)} The sets are {', '.join(PROMPT_SETS)}"
        )
    return _joined(read_rows(Path(source)))


def _joined(rows: Sequence[tuple[Prompt, Mapping[str, str]]]) -> Prompts:
    columns = {prompt.prompt_id: more for prompt, more in rows if more}
    return Prompts(tuple(prompt for prompt, _ in rows), columns=columns)


def _of_rows(source: Any) -> Prompts:
    """Prompts of a list or a frame; raises UserError naming the row."""
    records = ((f"prompts[{number}]", number + 1, _record(given, f"prompts[{number}]"))
               for number, given in enumerate(_records(source)))  # fmt: skip
    rows = prompts_of_records(records)
    if not rows:
        raise UserError("there are no prompts; give at least one")
    return _joined(rows)


def _records(source: Any) -> Iterator[Any]:
    if hasattr(source, "to_dicts"):  # polars
        return iter(source.to_dicts())
    if hasattr(source, "to_dict") and hasattr(source, "columns"):  # pandas
        return _frame_records(source)
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise UserError(
            f"prompts cannot be read from a {type(source).__name__}; give a set's name, a file, a list of dicts or of"
            " (text, answer) pairs, or a data frame"
        )
    return iter(source)


def _frame_records(frame: "pd.DataFrame") -> Iterator[dict[Any, Any]]:
    """Rows of a pandas frame. It turns integers with a gap among them into floats: these are turned back."""
    whole = [
        name for name in frame.columns
        if frame[name].dtype.kind == "f" and (frame[name].dropna() % 1 == 0).all()
    ]  # fmt: skip
    for record in frame.to_dict("records"):
        yield {name: int(value) if name in whole and not math.isnan(value) else value for name, value in record.items()}


def _record(given: Any, where: str) -> Mapping[str, Any] | Prompt:
    if isinstance(given, Prompt):
        return given
    if isinstance(given, Mapping):
        return {str(name): as_json_value(value) for name, value in given.items()}
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == 2:
        return {"text": as_json_value(given[0]), "answer": as_json_value(given[1])}
    raise UserError(f"{where}: neither a dict with text and answer nor a (text, answer) pair: {str(given)[:80]!r}")
