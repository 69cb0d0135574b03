"""How the next token of one request is chosen from its logits.

Every request has settings and a random key of its own, so that neither a neighbour
nor the order of requests changes what it gets. The steps are mlx-lm's, in this order:
logit bias, penalties, grammar, temperature, filters, draw. The grammar comes before the
filters, which would else keep tokens that it forbids and may leave none. Runs on the
engine thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

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


class Sampler:
    """Chooses the tokens of one request.

    Args:
        params: The request's settings.
        prompt: The prompt's token ids; the repetition penalty counts them too.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._params = params
        self._prompt = list(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._key = mx.random.key(seed % 2**64)
        self._biased = mx.array([token for token, _ in params.logit_bias], mx.uint32)
        self._bias = mx.array([bias for _, bias in params.logit_bias], mx.float32)
        self._filters = _filters(params)

    def draw(
        self,
        logits: mx.array,
        generated: Sequence[int],
        allowed: mx.array | None = None,
    ) -> mx.array:
        """Return the next token, not evaluated yet, so that rows are computed together.

        Args:
            logits: ``[vocab]``.
            generated: Tokens of the answer so far.
            allowed: ``[vocab]`` bool, False for tokens that must not be drawn; None
                allows all.

        Returns:
            ``[1]`` int32; ``NOT_A_NUMBER`` where the logits are broken.
        """
        scores = logits[None].astype(mx.float32)
        if self._bias.size:
            scores = scores.at[:, self._biased].add(self._bias)
        scores = self._penalised(scores, generated)
        if allowed is not None:
            scores = mx.where(allowed, scores, -mx.inf)
        if self._params.temperature == 0:
            token = mx.argmax(scores, axis=-1)
        else:
            scores = scores / self._params.temperature
            scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
            for apply in self._filters:
                scores = apply(scores)
            self._key, key = mx.random.split(self._key)
            token = mx.random.categorical(scores, key=key)
        return mx.where(mx.isnan(logits).any(), NOT_A_NUMBER, token.astype(mx.int32))

    def _penalised(self, scores: mx.array, generated: Sequence[int]) -> mx.array:
        params = self._params
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
