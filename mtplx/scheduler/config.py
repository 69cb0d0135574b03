"""The settings of the scheduler, checked once, and the reasons for their defaults.

Names that vLLM has keep its meaning. ``mtplx.config`` owns what the user may set; the
engine turns that into this value.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplx.errors import ConfigError, InvalidRequestError

RELATIVE_ITL_TARGET = 2.6
"""Default for the token gap of a running stream, in undisturbed decode steps.

A gap of ``k`` steps leaves ``k - 1`` of every ``k`` step times to prefill, so the prompt
takes at least ``k / (k - 1)`` times as long as it would alone: 1.8 at ``k = 2.2``, 1.6 at
2.6, 1.5 at 3. Steps are also noisy: what is planned for ``k`` comes out up to a tenth
longer on a quiet machine and a third on a busy one, and a reader who sees a stream
stutter sees the longest gap. Measured on two shared CPU cores with a 135M model, 3
streams and a prompt of 900 tokens against a server that lets the streams stand still
(``benchmarks/README.md``): at 2.6 the worst gap was 2.4 undisturbed ones (2.2 to 2.9) and
the TTFT 1.1 times the other server's; at 3, 3.3 and 0.9, at 2.2, 2.3 and 1.6, both before
attention on the CPU was made faster.
"""

OVERTAKING_LIMIT = 4.0
"""A prompt has aged once this many times its own uncached tokens were computed for
others while it waited: long enough to let short prompts pass in ordinary traffic, and an
end to it under a steady stream of them."""


@dataclass(frozen=True)
class SchedulerConfig:
    """What bounds an iteration and the queue.

    Attributes:
        max_num_batched_tokens: Token budget of one iteration, decodes and prefill. At
            least ``max_num_seqs + min_prefill_tokens``, so that a full house of streams
            still leaves prefill its share.
        max_num_seqs: Most requests that run, prefilling and decoding.
        max_num_partial_prefills: Most prompts that are started and not complete.
        long_prefill_token_threshold: Most tokens of one prompt in one iteration; 0 means
            no limit but the budget. Leaves room for other prompts beside a long one.
        enable_chunked_prefill: Off: a prompt is one span, whatever its length, and one
            longer than ``max_whole_prompt_tokens`` is refused.
        spans_share_decodes: The model can compute a span in the forward of a decode; the
            first span of a step beside streams then does. A short span costs mostly the
            reading of the weights, which is then paid once.
        prefill_window: Longest span ``W``, in tokens.
        min_prefill_tokens: Guaranteed share of prefill in each iteration that has a
            started prompt, whatever the target.
        target_itl_s: Gap between tokens that a stream accepts, in seconds; None means
            ``relative_itl_target``.
        relative_itl_target: The same, in undisturbed decode steps. None with no
            ``target_itl_s`` leaves the token budget alone to limit an iteration.
        max_queue: Most requests that wait beyond the free seats.

    Raises:
        ConfigError: Values that contradict each other; the message says what to change.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 32
    max_num_partial_prefills: int = 4
    long_prefill_token_threshold: int = 0
    enable_chunked_prefill: bool = True
    spans_share_decodes: bool = False
    prefill_window: int = 2048
    min_prefill_tokens: int = 16
    target_itl_s: float | None = None
    relative_itl_target: float | None = RELATIVE_ITL_TARGET
    max_queue: int = 64

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_partial_prefills",
            "prefill_window",
            "min_prefill_tokens",
            "max_queue",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        least = self.max_num_seqs + self.min_prefill_tokens
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} leaves prefill less "
                f"than its share of {self.min_prefill_tokens} tokens beside "
                f"max_num_seqs={self.max_num_seqs} streams. Set it to at least {least}, or "
                "lower max_num_seqs."
            )
        threshold = self.long_prefill_token_threshold
        if threshold < 0 or 0 < threshold < self.min_prefill_tokens:
            raise ConfigError(
                f"long_prefill_token_threshold must be 0 (no limit) or at least "
                f"{self.min_prefill_tokens}, not {threshold}."
            )
        if self.target_itl_s is not None and self.target_itl_s <= 0:
            raise ConfigError(f"target_itl_s must be above 0, not {self.target_itl_s}.")
        if self.relative_itl_target is not None and self.relative_itl_target <= 1:
            raise ConfigError(
                "relative_itl_target must be above 1, the decode step itself, not "
                f"{self.relative_itl_target}."
            )

    @property
    def max_whole_prompt_tokens(self) -> int:
        """Longest prompt that fits one iteration beside a full house of streams."""
        return self.max_num_batched_tokens - (self.max_num_seqs - 1)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Refuse a prompt that must be computed whole and is too long for that.

        Raises:
            InvalidRequestError: With the limit and what to do.
        """
        limit = self.max_whole_prompt_tokens
        if not self.enable_chunked_prefill and prompt_tokens > limit:
            raise InvalidRequestError(
                f"The prompt has {prompt_tokens} tokens; without chunked prefill this "
                f"server reads at most {limit} at once (max_num_batched_tokens="
                f"{self.max_num_batched_tokens}, less one for each other stream). "
                "Send a shorter prompt, or raise max_num_batched_tokens.",
                param="messages",
            )

    def max_waiting(self, running: int) -> int:
        """Return how many requests may wait while ``running`` others run."""
        return self.max_queue + self.max_num_seqs - running
