"""Rows of MIB (arXiv 2504.13151) as prompts, and prompts as its rows: a sentence, another one, and the answers of both.

Knows the fields of MIB's sets of arithmetic and of indirect objects (IOI). A row's answer is compared with that of the
row's other sentence, which becomes the prompt's counterfactual and distractor. MIB takes arithmetic answers without a
space before them, and names with one.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mathinterp.errors import UserError, one_line_of
from mathinterp.gates import check_file
from mathinterp.prompts.json_lines import NumberText, as_json_value, write_json_lines
from mathinterp.prompts.prompt import Prompt
from mathinterp.prompts.templates import SIGNS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mathinterp.prompts.alignment import Encoding

HUB = "mib-bench/"
HUB_SETS = {"arithmetic_addition": "+", "arithmetic_subtraction": "-", "ioi": None}  # set -> the operator that is kept
HUB_SPLIT = "validation"
OPERATIONS = {sign: operation for operation, sign in SIGNS.items()}
ARITHMETIC, IOI = "random_counterfactual", "s2_io_flip_counterfactual"
FURTHER = ("idx", "num_digit")  # kept beside the prompt
SEVERAL, SHARED = "with an answer of several tokens", "whose answer shares a token with the space before it"

logger = logging.getLogger(__name__)


def is_row(record: Mapping[str, Any]) -> bool:
    """Whether a record is of MIB's form and no prompt of ours."""
    known = record.keys() & {"label", "metadata"} or {"correct", "incorrect"} <= record.keys()
    return bool(known) and "prompt" in record and "text" not in record


def lacks_pair(record: Mapping[str, Any]) -> bool:
    """Whether a row of arithmetic has null in the place of its other sentence; MIB leaves these out."""
    if not is_row(record) or ARITHMETIC not in record:
        return False
    other = record[ARITHMETIC]
    return other is None or (isinstance(other, Mapping) and other.get("prompt") is None)


def fields_of(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A row's fields under our names: text, answer, counterfactual, distractor, separator and what else it says.

    Rows of arithmetic have ``label`` and ``random_counterfactual``; of IOI ``metadata`` and
    ``s2_io_flip_counterfactual``; others ``correct``, ``incorrect`` (with the space that stands before them) and
    ``counterfactual``. Raises UserError for a row that lacks one of these.
    """
    if "label" in record:
        found = _arithmetic(record, where)
    elif "metadata" in record:
        names = _object(record, "metadata", where)
        answers = [f" {_value(names, name, where)}" for name in ("indirect_object", "subject")]
        found = {**_pair(record, _object(record, IOI, where), answers), "operation": "ioi"}
    else:
        other = record.get("counterfactual")
        given = other if isinstance(other, Mapping) else {"prompt": other}
        found = _pair(record, given, [_value(record, name, where) for name in ("correct", "incorrect")])
    return {name: as_json_value(value) for name, value in found.items()}


def _arithmetic(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    other = _object(record, ARITHMETIC, where)
    operator = str(record.get("operator") or "")
    more = {
        "operation": OPERATIONS.get(operator, operator) or None,
        "operand_a": record.get("operand1"),
        "operand_b": record.get("operand2"),
    }
    return {**_pair(record, other, [_value(each, "label", where) for each in (record, other)]), **more}


def _pair(record: Mapping[str, Any], other: Mapping[str, Any], answers: list[str]) -> dict[str, Any]:
    """What rows of every kind have; the separator is a space where both answers begin with one."""
    spaced = all(answer[:1] == " " and answer.strip() for answer in answers)
    own = {name: record.get(name) for name in ("prompt_id", "operation", "template", *FURTHER)}
    return own | {
        "text": record["prompt"],
        "answer": answers[0].removeprefix(" ") if spaced else answers[0],
        "counterfactual": other.get("prompt"),
        "distractor": answers[1].removeprefix(" ") if spaced else answers[1],
        "separator": " " if spaced else "",
        "one_token": True,
    }


def _object(record: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = record.get(name)
    if not isinstance(value, Mapping) or (name != "metadata" and not isinstance(value.get("prompt"), str)):
        form = "of names" if name == "metadata" else "with a prompt"
        raise UserError(f"{where}: '{name}' must be an object {form}: without it a row of MIB is no pair")
    return value


def _value(record: Mapping[str, Any], name: str, where: str) -> str:
    value = record.get(name)
    if isinstance(value, NumberText):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise UserError(f"{where}: '{name}' must be text or a whole number, not {value!r}")
    return str(value)


# ---- sets of the hub ----


def is_hub_set(source: object) -> bool:
    """Whether it is called mib-bench/NAME or mib-bench/NAME:SPLIT, and no file is."""
    return str(source).startswith(HUB) and not Path(str(source)).is_file()


def hub_records(source: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Where it stands, number from 1 and row of each row of a set; without those of other operators, as MIB reads it.

    Raises UserError for an unknown set, and where the set cannot be had.
    """
    name, _, split = source.removeprefix(HUB).partition(":")
    if name not in HUB_SETS:
        raise UserError(
            f"'{source}': sets of MIB that are read here are {', '.join(HUB + known for known in HUB_SETS)}"
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"'{source}' is read from the hub by the package datasets; install it: pip install datasets"
                        ) from error  # fmt: skip
    operator = HUB_SETS[name]
    try:
        found = load_dataset(HUB + name, split=split or HUB_SPLIT)
    except Exception as error:  # whatever the library and the network raise
        raise UserError(
            f"'{source}' cannot be had from the hub: {type(error).__name__}: {one_line_of(error, 200)};"
            " give a downloaded file of it (JSON lines or Parquet)"
            + (f" with the rows whose operator is '{operator}' alone" if operator else "")
        ) from error
    for number, row in enumerate(found, start=1):
        if operator is None or row.get("operator") == operator:
            yield f"{source}, row {number}", number, {key: as_json_value(value) for key, value in row.items()}


# ---- what a tokenizer makes of the answers ----


def fitting(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> Sequence[Prompt]:
    """The prompts without those rows of MIB that it leaves out, and pairs that do not align; a warning counts them.

    MIB takes pairs of numbers that are one token each, and tokenizes prompt and answer apart: a tokenizer must not join
    an answer with the space that its prompt ends with. For rows of names ours is stricter: MIB takes those whose
    indirect object, subject and random_c have equally many tokens, and compares the first ones; here each is one token.
    Pairs of equal answers have a difference of 0 under every circuit, and change no measure of MIB's. Raises UserError
    if none is left.
    """
    asked = [prompt for prompt in prompts if prompt.one_token]
    if not asked:
        return prompts
    reasons = dict(zip((prompt.prompt_id for prompt in asked), _reasons(asked, tokenizer), strict=True))
    left = [prompt for prompt in prompts if reasons.get(prompt.prompt_id) is None]
    out = [reason for reason in reasons.values() if reason is not None]
    if out:
        counts = ", ".join(f"{out.count(reason)} {reason}" for reason in dict.fromkeys(out))
        told = f"{len(out)} of {len(prompts)} pairs are left out: {counts}"
        if any(reasons[prompt.prompt_id] == SEVERAL for prompt in asked if prompt.operation == "ioi"):
            told += " (stricter than MIB, which takes names of several tokens if all have equally many)"
        if not left:
            raise UserError(f"{told}; take a set whose answers are one token of this model's tokenizer each")
        logger.warning(told)
    return left if out else prompts


def _reasons(prompts: Sequence[Prompt], tokenizer: "PreTrainedTokenizerBase") -> Iterable[str | None]:
    """Why a pair is left out; None: it is kept."""
    from mathinterp.prompts.alignment import check_tokenizer, encode, same_alignment

    check_tokenizer(tokenizer)
    own = encode([(prompt, prompt.text) for prompt in prompts], tokenizer)
    other = encode([(prompt, prompt.counterfactual or prompt.text) for prompt in prompts], tokenizer)
    wrong = [replace(prompt, answer=prompt.distractor or prompt.answer) for prompt in prompts]
    rivals = encode([(prompt, prompt.text) for prompt in wrong], tokenizer)
    together = [_joins_space(each, tokenizer) for each in (own, other, rivals)]
    for prompt, one, two, rival, joined in zip(prompts, own, other, rivals, zip(*together, strict=True), strict=True):
        if prompt.separator == "" and any(joined):
            yield SHARED
        elif any(len(each.input_ids) - each.first_answer_index != 1 for each in (one, rival)):
            yield SEVERAL
        elif prompt.distractor is not None and one.input_ids == rival.input_ids:
            yield "with the same answer"
        else:
            yield None if same_alignment(one, two) else "with sentences of different numbers of tokens"


def _joins_space(encodings: Sequence["Encoding"], tokenizer: "PreTrainedTokenizerBase") -> list[bool]:
    """Whether the tokens before an answer are others than the prompt's alone, at the last of which MIB reads.

    Offsets do not suffice: some tokenizers (GPT-NeoX's) leave the space out of those of a token that holds it.
    """
    alone = tokenizer([each.sentence[: each.answer_start] for each in encodings])["input_ids"]
    found = []
    for each, ids in zip(encodings, alone, strict=True):
        first = each.first_answer_index
        added = ids[-1:] == [tokenizer.eos_token_id] and len(ids) > first  # an EOS after the text
        same = each.input_ids[:first] == tuple(ids[:-1] if added else ids)
        found.append(not same or each.spans[first][0] < each.answer_start)
    return found


# ---- prompts as rows ----


def write_rows(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write arithmetic pairs as rows of MIB, which its own code reads: the label follows the prompt as it stands.

    Folders above it are made. Raises UserError for a prompt without a counterfactual or a distractor, and if the file
    cannot be written.
    """
    rows = [_row(number, prompt) for number, prompt in enumerate(prompts)]
    check_file(path, "prompts")
    path = Path(path).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write prompts to {path}: {error.strerror}") from error
    write_json_lines(rows, path, "prompts")


def _row(number: int, prompt: Prompt) -> dict[str, Any]:
    if prompt.counterfactual is None or prompt.distractor is None:
        raise UserError(
            f"prompt '{prompt.prompt_id}' has no counterfactual or no distractor, and a row of MIB is a pair; take the"
            " set operand_pairs or one_token_pairs"
        )
    row = {
        "idx": number,
        "template": prompt.template,
        "prompt": prompt.text + prompt.separator,
        "label": prompt.answer,
        "operator": SIGNS.get(prompt.operation or "", prompt.operation),
        "operand1": _whole(prompt.operand_a),
        "operand2": _whole(prompt.operand_b),
        ARITHMETIC: {"prompt": prompt.counterfactual + prompt.separator, "label": _whole(prompt.distractor)},
    }
    return {name: value for name, value in row.items() if value is not None}


def _whole(text: str | None) -> int | str | None:
    whole = text is not None and re.fullmatch(r"-?[0-9]{1,18}", text) and str(int(text)) == text
    return int(text) if text is not None and whole else text


def parquet_records(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Where it stands, number from 1 and fields of each row of a Parquet file; raises UserError for what is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.ParquetFile(path).read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read prompts from {path}: {one_line_of(error, 200)}") from error
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", number, {name: as_json_value(value) for name, value in row.items()}
