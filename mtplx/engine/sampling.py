"""How the next tokens are chosen from their logits.

Every request has settings and random numbers of its own, so that neither a neighbour
nor the order of requests changes what it gets; rows with the same settings are drawn in
one operation. The steps are mlx-lm's, in this order: logit bias, penalties, grammar,
temperature, filters, draw. The grammar comes before the filters, which would else keep
tokens that it forbids and may leave none. Runs on the engine thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_frequency_penalty,
    make_presence_penalty,
    make_repetition_penalty,
)

from mtplx.types import SamplingParams

WHOLE_CONTEXT = 1 << 30
"""mlx-lm's penalties look at the last 20 tokens unless told otherwise; OpenAI's look
at all of them."""

NOT_A_NUMBER = -1
"""Drawn in place of a token when the model gave logits that are not numbers."""


@dataclass(frozen=True)
class Draw:
    """What one token is drawn by.

    Attributes:
        sampler: The request's.
        generated: Tokens of the answer so far.
        allowed: ``[vocab]`` bool, False for tokens that must not be drawn; None allows
            all.
    """

    sampler: Sampler
    generated: Sequence[int] = ()
    allowed: mx.array | None = None


def draw_tokens(logits: mx.array, draws: Sequence[Draw]) -> mx.array:
    """Return the next token of each row, not evaluated yet.

    Args:
        logits: ``[n, vocab]``.
        draws: One for each row.

    Returns:
        ``[n]`` int32; ``NOT_A_NUMBER`` where the logits are broken.
    """
    alike: dict[tuple[float, ...], list[int]] = {}
    for row, draw in enumerate(draws):
        alike.setdefault(draw.sampler.way, []).append(row)
    order: list[int] = []
    tokens = []
    for rows in alike.values():
        group = [draws[row] for row in rows]
        if any(draw.sampler.changes_scores(draw) for draw in group):
            scores = mx.concatenate(
                [
                    draw.sampler.scores(logits[row : row + 1], draw)
                    for row, draw in zip(rows, group, strict=True)
                ]
            )
        else:
            whole = len(rows) == len(draws)
            scores = (logits if whole else logits[mx.array(rows)]).astype(mx.float32)
        tokens.append(_choose(scores, [draw.sampler for draw in group]))
        order += rows
    drawn = tokens[0] if len(tokens) == 1 else mx.concatenate(tokens)
    if order != [*range(len(order))]:
        drawn = drawn[mx.argsort(mx.array(order))]
    return mx.where(mx.isnan(logits).any(axis=-1), NOT_A_NUMBER, drawn)


def _choose(scores: mx.array, samplers: Sequence[Sampler]) -> mx.array:
    """Draw from ``[n, vocab]`` with the settings that all of ``samplers`` have."""
    params = samplers[0].params
    if params.temperature == 0:
        return mx.argmax(scores, axis=-1).astype(mx.int32)
    scores = scores / params.temperature
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    for apply in _filters(params):
        scores = apply(scores)
    keys = mx.array([sampler.next_key() for sampler in samplers], mx.uint32)
    return _draw_each(scores, keys).astype(mx.int32)


_draw_each: Callable[[mx.array, mx.array], mx.array] = mx.vmap(
    lambda scores, key: mx.random.categorical(scores, key=key)
)


class Sampler:
    """The settings and the random numbers of one request.

    Args:
        params: The request's settings.
        prompt: The prompt's token ids; the repetition penalty counts them too.

    Attributes:
        way: Rows with the same one are drawn together.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self.params = params
        filters = (params.top_p, params.top_k, params.min_p)
        self.way = (params.temperature, *(filters if params.temperature else ()))
        self._prompt = list(prompt)
        self._state = secrets.randbits(64) if params.seed is None else params.seed % 2**64
        self._biased = mx.array([token for token, _ in params.logit_bias], mx.uint32)
        self._bias = mx.array([bias for _, bias in params.logit_bias], mx.float32)

    def next_key(self) -> tuple[int, int]:
        """Return a fresh key for MLX's random functions, by SplitMix64 (Steele, Lea and
        Flood, 2014)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) % 2**64
        mixed = self._state
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
        return mixed >> 32, mixed % 2**32

    def changes_scores(self, draw: Draw) -> bool:
        """Say whether ``scores`` would be anything but the logits."""
        params = self.params
        return bool(
            draw.allowed is not None
            or params.logit_bias
            or params.repetition_penalty != 1
            or (draw.generated and (params.presence_penalty or params.frequency_penalty))
        )

    def scores(self, logits: mx.array, draw: Draw) -> mx.array:
        """Return ``[1, vocab]`` logits with bias, penalties and grammar applied."""
        scores = logits.astype(mx.float32)
        if self._bias.size:
            scores = scores.at[:, self._biased].add(self._bias)
        scores = self._penalised(scores, draw.generated)
        if draw.allowed is not None:
            scores = mx.where(draw.allowed, scores, -mx.inf)
        return scores

    def _penalised(self, scores: mx.array, generated: Sequence[int]) -> mx.array:
        params = self.params
        if params.repetition_penalty != 1:
            seen = mx.array([*self._prompt, *generated])
            penalty = make_repetition_penalty(params.repetition_penalty, WHOLE_CONTEXT)
            scores = penalty(seen, scores)
        if generated and params.presence_penalty:
            penalty = make_presence_penalty(params.presence_penalty, WHOLE_CONTEXT)
            scores = penalty(mx.array(list(generated)), scores)
        if generated and params.frequency_penalty:
            penalty = make_frequency_penalty(params.frequency_penalty, WHOLE_CONTEXT)
            scores = penalty(mx.array(list(generated)), scores)
        return scores


def _filters(params: SamplingParams) -> list[Callable[[mx.array], mx.array]]:
    filters: list[Callable[[mx.array], mx.array]] = []
    if params.top_k > 0:
        # mlx-lm refuses a top_k that removes nothing.
        filters.append(
            lambda scores: (
                apply_top_k(scores, params.top_k)
                if params.top_k < scores.shape[-1]
                else scores
            )
        )
    if params.top_p < 1:
        filters.append(lambda scores: apply_top_p(scores, params.top_p))
    if params.min_p > 0:
        filters.append(lambda scores: apply_min_p(scores, params.min_p))
    return filters
