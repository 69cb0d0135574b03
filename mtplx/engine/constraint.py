"""Which tokens a grammar allows next.

``Grammars`` is made once for a model; ``Constraint`` follows one answer. llguidance
needs from some microseconds to milliseconds for a mask, and longer to take a grammar in.
It lets go of the interpreter meanwhile, so both run on worker threads while the engine
thread computes logits: it waits, if at all, only where it draws the token. What a
grammar says, and whether it can be served, is ``mtplx.text.grammar``'s to decide.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from mtplx.errors import GenerationError

Mask = npt.NDArray[np.bool_]


class Grammars:
    """Makes the constraints of one model's answers.

    Args:
        vocabulary: The model's tokens as llguidance knows them, padded to the rows of
            the output layer.
    """

    def __init__(self, vocabulary: LLTokenizer) -> None:
        self._vocabulary = vocabulary
        # Its threads are started when needed, and end when it is dropped.
        self._workers = ThreadPoolExecutor(thread_name_prefix="mtplx-grammar")

    def constrain(self, grammar: str) -> Constraint:
        """Return what holds one answer to ``grammar``. Returns at once; what is wrong
        with the grammar shows at the first mask."""
        return Constraint(grammar, self._vocabulary, self._workers)


class Constraint:
    """Holds one answer to its grammar.

    The engine thread calls ``allowed`` and ``advance`` in turn. Invariant: the matcher
    is touched by a worker between the two only, never by both threads.
    """

    def __init__(self, grammar: str, vocabulary: LLTokenizer, workers: Executor) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._workers = workers
        self._bits = allocate_token_bitmask(1, vocabulary.vocab_size)
        self._mask: Future[Mask] = workers.submit(self._begin)

    def allowed(self) -> mx.array:
        """Return which tokens may come next, ``[vocab]`` bool. The end tokens are among
        them exactly when the answer is complete as it stands.

        Raises:
            GenerationError: The grammar cannot be used, or is too complex to go on.
        """
        return mx.array(self._mask.result())

    def advance(self, token_id: int) -> bool:
        """Take the token that was drawn.

        Returns:
            True when the answer is complete and nothing but its end can follow.

        Raises:
            GenerationError: The grammar does not allow the token.
        """
        self._matcher.consume_token(token_id)
        self._check()
        if self._matcher.is_stopped():
            return True
        self._mask = self._workers.submit(self._fill)
        return False

    # -- worker threads ---------------------------------------------------------

    def _begin(self) -> Mask:
        # Errors are told to the client: no state of the parser, and nothing on stderr.
        limits = LLParserLimits(verbose_errors=False)
        self._matcher = LLMatcher(
            self._vocabulary, self._grammar, log_level=0, limits=limits
        )
        self._check()
        return self._fill()

    def _fill(self) -> Mask:
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        bits = self._bits.view(np.uint8)[0]
        mask = np.unpackbits(bits, count=self._vocabulary.vocab_size, bitorder="little")
        return mask.view(np.bool_)

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().partition("\n")[0]
            raise GenerationError(
                f"The answer cannot be held to its grammar: {reason}. "
                "Send a simpler grammar or schema, or none."
            )
