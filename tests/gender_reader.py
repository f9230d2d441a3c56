"""A tiny model that reads genders."""

import torch

from mathinterp.prompts.gender import bias_prompts, contrast_prompts
from tests.tiny import tiny_model, tiny_tokenizer


def save_reader(folder):
    """A tiny model whose tokenizer reads the gender prompts: words it lacks become letters of its vocabulary."""
    prompts = contrast_prompts() + bias_prompts()
    words = {word for p in prompts for word in f"{p.text} {p.answer}".replace("'", " ' ").split()}
    known = set(tiny_tokenizer().get_vocab())
    extra = sorted(words - known)
    tiny_model("llama", dtype=torch.float32).save_pretrained(folder)
    tiny_tokenizer(extra).save_pretrained(folder)
    return folder
