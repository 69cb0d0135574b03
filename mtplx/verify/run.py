"""Runs every check on one model, one after another, whatever becomes of each.

Nothing is made for the purpose: the code that is exercised is the code that serves. Runs
on the thread that owns MLX.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from mtplx.engine.chunking import chunking_problem
from mtplx.errors import GenerationError, InvalidRequestError
from mtplx.generation import PromptPrefill
from mtplx.models import Model
from mtplx.types import Prompt
from mtplx.verify.checks import Check, NotPossibleError, NotReachedError
from mtplx.verify.prompt import make_prompt
from mtplx.verify.reference import Reference, Tally
from mtplx.verify.served import Served
from mtplx.verify.ways import Reach, Ways

logger = logging.getLogger(__name__)

LEAST_TOKENS = 96
"""Two thirds of a prompt are restored, and the disk tier takes no less than 64 tokens."""

_SPANS = 5


def verify(
    model: Model,
    *,
    tokens: int,
    new_tokens: int,
    seed: int = 0,
    window: int | None = None,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Check]:
    """Check that every way to the state of a prompt computes what one pass computes.

    Args:
        model: Under test.
        tokens: Length of the prompt, at least ``LEAST_TOKENS``.
        new_tokens: Length of the answer, at least 2.
        seed: Of the prompt.
        window: Longest span in tokens; None takes a fifth of the prompt.
        on_start: Told the name of each check when it begins.

    Raises:
        InvalidRequestError: These lengths do not fit the model.
        GenerationError: The model fails on the prompt in one pass.
    """
    if tokens < LEAST_TOKENS or new_tokens < 2:
        raise InvalidRequestError(
            f"At least {LEAST_TOKENS} tokens and 2 new ones are needed, not {tokens} and "
            f"{new_tokens}."
        )
    if tokens + new_tokens > model.context_length:
        raise InvalidRequestError(
            f"{tokens} tokens and {new_tokens} new ones do not fit the context of "
            f"{model.context_length} tokens. Ask for fewer."
        )
    if window is None:
        window = -(-tokens // _SPANS)
    on_start("cold")
    begin_s = time.perf_counter()
    problem = chunking_problem(model)
    prompt = make_prompt(model, tokens, seed)
    try:
        tally, reference = _cold(model, prompt, new_tokens, problem)
    except Exception as error:
        raise GenerationError(
            f"{model.name} fails on the prompt in one pass, so there is nothing to compare "
            f"with: {error}. Try another dtype, float32 say."
        ) from error
    cold = tally.check(
        "cold", {"spans": 1, "tokens": tokens}, time.perf_counter() - begin_s
    )
    whole = "" if problem is None else f"This model must be read whole: {problem}."
    checks = [replace(cold, note=cold.note or whole)]
    ways = Ways(model, reference, window, shared_tokens=tokens * 2 // 3)
    in_parts: dict[str, Callable[[Tally], Reach]] = {
        "chunked": ways.chunked,
        "batched, together": ways.together,
        "batched, apart": ways.apart,
        "shared span": ways.shared_span,
        "warm": ways.warm,
        "memory, borrowed": ways.borrowed,
        "memory, copied": ways.copied,
        "disk": ways.from_disk,
    }
    for name, way in in_parts.items():
        on_start(name)
        if whole:
            checks.append(Check(name, "not possible", note=whole))
        else:
            checks.append(_run(name, way, Tally(reference)))
    for name, overlaps in (("engine", False), ("engine, overlapped", True)):
        on_start(name)

        def served(tally: Tally, overlaps: bool = overlaps) -> Reach:
            return Served(model, reference, window, overlaps=overlaps).run(tally)

        checks.append(_run(name, served, Tally(reference)))
    return checks


def _cold(
    model: Model, prompt: tuple[int, ...], new_tokens: int, problem: str | None
) -> tuple[Tally, Reference]:
    """Read the prompt in one span and decode; then read both in one pass.

    For a model that must be read whole, prompt and answer in one pass are not prompt,
    then answer: the latter, alone, is the reference there.
    """
    prefill = PromptPrefill(
        model,
        Prompt(prompt),
        None,
        arrival_s=0.0,
        window=len(prompt),
        tail_grid=len(prompt),
    )
    prefill.run()
    rows = model.decode(prefill.cache, new_tokens).astype(mx.float32)
    answer = tuple(int(mx.argmax(row)) for row in rows)
    logits = rows
    if problem is None:
        whole = (*prompt, *answer[:-1])
        logits = model.score(model.new_cache(), whole).astype(mx.float32)
    reference = Reference(prompt, answer, logits, model.dtype)
    tally = Tally(reference)
    for step, row in enumerate(rows):
        tally.add(len(prompt) - 1 + step, row)
    return tally, reference


def _run(name: str, way: Callable[[Tally], Reach], tally: Tally) -> Check:
    begin_s = time.perf_counter()
    try:
        reach = way(tally)
    except NotPossibleError as reason:
        return Check(name, "not possible", note=str(reason))
    except NotReachedError as reason:
        return Check(name, "failed", note=str(reason))
    except Exception as error:
        # Whatever it is, the other checks have their own say.
        logger.exception("The check %r raised", name)
        return Check(name, "failed", note=f"{type(error).__name__}: {error}")
    return tally.check(name, reach, time.perf_counter() - begin_s)
