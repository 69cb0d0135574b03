"""How likely tokens were, by the model alone.

Turns logits into ``TokenLogprob``: of a drawn token as arrays that are computed together
with it, of a prompt bit by bit while its spans are read. Logits are never kept. Runs on
the engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mtplx.types import TokenLogprob


class Scores(NamedTuple):
    """Log-probabilities of n tokens, not evaluated yet; ``mx.eval`` takes it as it is.

    Attributes:
        token_ids: ``[n]``.
        logprobs: ``[n]`` float32.
        top_ids: ``[n, top]``, in no order.
        top_logprobs: ``[n, top]`` float32.
    """

    token_ids: mx.array
    logprobs: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    def computed_with(self, tokens: mx.array) -> mx.array:
        """Return ``tokens``, such that evaluating them evaluates these too: the device
        is waited for once."""
        return mx.depends(tokens, [*self])

    def read(self) -> list[TokenLogprob]:
        """Return the values, the most likely tokens best first."""
        rows = (array.tolist() for array in self)
        return [
            TokenLogprob(token, logprob, _best_first(ids, values))
            for token, logprob, ids, values in zip(*rows, strict=True)
        ]


def score(logits: mx.array, token_ids: mx.array, top: int) -> Scores:
    """Score each token against the logits it was, or could have been, drawn from.

    Args:
        logits: ``[n, vocab]``, as the model gave them.
        token_ids: ``[n]``.
        top: How many of the most likely tokens to tell besides.
    """
    logits = logits.astype(mx.float32)
    norm = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, token_ids[:, None], axis=-1) - norm
    top = min(top, logits.shape[-1])
    if top:
        top_ids = mx.argpartition(logits, kth=-top, axis=-1)[:, -top:]
    else:
        top_ids = mx.zeros((len(token_ids), 0), dtype=mx.uint32)
    best = mx.take_along_axis(logits, top_ids, axis=-1) - norm
    return Scores(token_ids, own[:, 0], top_ids, best)


class PromptScores:
    """Collects the log-probabilities of one prompt while it is read.

    Invariant: ``tokens`` covers the prompt up to the token that the last row of logits
    predicts; spans are scored in order, each once.

    Args:
        token_ids: The prompt.
        top: How many of the most likely tokens to tell for each token.

    Attributes:
        tokens: One entry for each token so far, None for the first.
    """

    def __init__(self, token_ids: tuple[int, ...], top: int) -> None:
        self._token_ids = token_ids
        self._top = top
        self.tokens: list[TokenLogprob | None] = [None]

    @property
    def complete(self) -> bool:
        """Every token of the prompt has its entry."""
        return len(self.tokens) == len(self._token_ids)

    def add(self, logits: mx.array, start: int) -> None:
        """Score the tokens that a span predicts.

        Args:
            logits: ``[n, vocab]``, of the prompt's tokens ``[start, start + n)``; few
                rows, since as much memory again is needed. The last row of the prompt
                predicts the answer, and is left out.
            start: Index of the first of them.
        """
        assert start == len(self.tokens) - 1
        targets = self._token_ids[start + 1 : start + 1 + len(logits)]
        if targets:
            scores = score(logits[: len(targets)], mx.array(targets), self._top)
            mx.eval(scores)
            self.tokens += scores.read()


def _best_first(ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    # Equal ones by id, so that the order does not depend on how they were found.
    order = sorted(zip(ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(order)
