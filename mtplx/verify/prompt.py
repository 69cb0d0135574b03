"""The prompt of the self-test: plain sentences, the same for the same seed.

Random token ids would do for the arithmetic, but a model is hardly ever sure of what
follows them, and near ties would hide a true flip.
"""

from __future__ import annotations

import random

from mtplx.models import Model
from mtplx.text.tokenizer import Tokenizer

_WHO = ("The gardener", "A young pilot", "Our neighbour", "The librarian", "My sister")
_DID = ("repaired", "painted", "borrowed", "described", "forgot", "carried home")
_WHAT = ("the old clock", "a blue boat", "seven letters", "the map", "a box of seeds")
_WHERE = ("near the river", "behind the station", "before breakfast", "in the rain")
_WHY = ("because it was late", "and told nobody", "as the list said", "for the third time")


def make_prompt(model: Model, tokens: int, seed: int) -> tuple[int, ...]:
    """Return a prompt of exactly that many tokens.

    Without a tokenizer its ids are drawn at random.
    """
    draw = random.Random(seed)
    if model.tokenizer is None:
        return tuple(draw.randrange(model.vocab_size) for _ in range(tokens))
    encode = Tokenizer(model.tokenizer).encode
    sentences: list[str] = []
    ids: list[int] = []
    while len(ids) < tokens:
        for _ in range(tokens // 8 + 1):
            words = " ".join(map(draw.choice, (_WHO, _DID, _WHAT, _WHERE, _WHY)))
            sentences.append(f"{len(sentences) + 1}. {words}.")
        ids = encode("\n".join(sentences), add_special_tokens=True)
    return tuple(ids[:tokens])
