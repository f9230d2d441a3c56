"""The prompts of the gender edit: professions, the gender each is stereotyped as, and sentences that ask for them.

Knows words and sentences (gender.json; paper A section 6.2, method.md section 6); knows nothing about tokenizers or
models. The answer of a prompt is a profession: its log-probability is the sum over its tokens.
"""

import json
from pathlib import Path

from mathinterp.prompts.prompt import Prompt

DATA_FILE = Path(__file__).with_name("gender.json")
_DATA = json.loads(DATA_FILE.read_text(encoding="utf-8"))

TEMPLATES: tuple[str, ...] = tuple(_DATA["templates"])  # <g> stands for the gender; the first one finds the neurons
PROFESSIONS: dict[str, tuple[str, ...]] = {gender: tuple(names) for gender, names in _DATA["professions"].items()}
GENDERS: tuple[str, ...] = tuple(PROFESSIONS)


def other_gender(gender: str) -> str:
    """The gender that a profession is not stereotyped as."""
    (other,) = (name for name in GENDERS if name != gender)
    return other


def contrast_prompts() -> list[Prompt]:
    """A prompt a profession on the first template: X_r names the stereotyped gender, X_c the other one.

    operation is the stereotype and prompt_id the profession.
    """
    return [
        Prompt(
            prompt_id=profession,
            text=_fill(TEMPLATES[0], gender),
            answer=profession,
            operation=gender,
            operand_a=gender,
            operand_b=profession,
            template=TEMPLATES[0],
            counterfactual=_fill(TEMPLATES[0], other_gender(gender)),
        )
        for gender, professions in PROFESSIONS.items()
        for profession in professions
    ]


def bias_prompts() -> list[Prompt]:
    """Every template with either gender and every profession: 8 x 2 x 32.

    operation is the profession's stereotype, operand_a the gender in the sentence, operand_b the profession.
    """
    return [
        Prompt(
            prompt_id=f"{profession}-{gender}-{number}",
            text=_fill(template, gender),
            answer=profession,
            operation=stereotype,
            operand_a=gender,
            operand_b=profession,
            template=template,
        )
        for number, template in enumerate(TEMPLATES, start=1)
        for gender in GENDERS
        for stereotype, professions in PROFESSIONS.items()
        for profession in professions
    ]


def _fill(template: str, gender: str) -> str:
    return template.replace("<g>", gender)
