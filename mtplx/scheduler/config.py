"""The settings of the scheduler, checked once, and the reasons for their defaults.

Names that vLLM has keep its meaning. ``mtplx.config`` owns what the user may set; the
engine turns that into this value.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplx.errors import ConfigError

RELATIVE_ITL_TARGET = 3.0
"""Default for the token gap of a running stream, in undisturbed decode steps.

A gap of ``k`` steps leaves ``k - 1`` of every ``k`` step times to prefill, so the prompt
takes at least ``k / (k - 1)`` times as long as it would alone: 2 at ``k = 2``, 1.5 at 3,
1.33 at 4. On top of that each span reads the weights once more. With the costs measured
on two CPU cores for a 135M model in float32 (decode step 92 ms; a span 60 ms and 4.5 ms a
token) the simulator reads 900 tokens beside 3 streams in 13.0 s at 2.5 steps, 9.9 s at 3,
8.3 s at 3.5 and 7.6 s at 4, against 4.3 s without a target. Below 3 the prompt loses much
and the streams gain little; above it a reader sees the streams stutter.
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
