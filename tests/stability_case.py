"""Rankings for tests of their stability."""

import dataclasses

from mathinterp.prompts.prompt import TokenizedPrompt
from tests.small_store import prompt

HEADS = [(layer, head) for layer in range(2) for head in range(4)]


DRAWS, SEED = 20, 3


def made_prompts(templates: int = 3) -> list[TokenizedPrompt]:
    """Two operations, 9 and 6 prompts, of one or two tokens, in turn of so many templates."""
    made = []
    for number in range(15):
        operation = "add" if number < 9 else "sub"
        item = prompt(f"p{number:02d}", operation, ("memorize",) * (1 + number % 2))
        template = f"{operation}-{number % templates}"
        made.append(dataclasses.replace(item, prompt=dataclasses.replace(item.prompt, template=template)))
    return made
