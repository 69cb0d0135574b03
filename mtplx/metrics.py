"""What a request cost, measured where it happened.

``PrefillMetrics`` and ``StreamMetrics`` are the values that travel to the client;
``PrefillClock`` collects the former while a request runs. The clock belongs to the
thread that runs the request and never reads the time itself, so that tests can give it
any.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Divergence:
    """Where a prompt leaves what the SessionBank holds.

    Attributes:
        index: Of the first token that differs.
        kept_token, sent_token: What was held there, and what the prompt has.
        kept_text, sent_text: Their texts; empty where nobody decoded them.
    """

    index: int
    kept_token: int
    sent_token: int
    kept_text: str = ""
    sent_text: str = ""


@dataclass(frozen=True)
class PrefillMetrics:
    """How one prompt became a complete KV cache.

    Attributes:
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens whose state was restored from the SessionBank.
        new_prefill_tokens: Prompt tokens that were computed. The two add up.
        prefill_tok_s: ``new_prefill_tokens`` over ``prefill_s``. None without time.
        prefill_compute_tok_s: ``new_prefill_tokens`` over the time spent in the
            model alone. None without time.
        queue_s: Seconds from the arrival of the request to the start of its prefill.
        cache_restore_s: Seconds spent finding and restoring state.
        prefill_s: Seconds of the whole prefill phase: restore, spans, and waits
            between spans.
        ttft_s: Seconds from the arrival of the request to its first token. None when
            no token was sampled.
        prefill_chunks: Spans that were computed.
        prefill_chunk_size: Longest span that was computed, in tokens.
        cache_source: ``"memory"``, or ``"disk"`` when some of it came from there; None
            when nothing was restored.
        cache_miss_reason: Why no more was restored, one of those in ``session.Match``;
            None where no more of this prompt was held.
        cache_lost_tokens: Tokens that were computed for that reason.
        cache_divergence: Where the prompt leaves what was held; None where it does not.
    """

    prompt_tokens: int
    cached_tokens: int
    new_prefill_tokens: int
    prefill_tok_s: float | None
    prefill_compute_tok_s: float | None
    queue_s: float
    cache_restore_s: float
    prefill_s: float
    ttft_s: float | None
    prefill_chunks: int
    prefill_chunk_size: int
    cache_source: str | None
    cache_miss_reason: str | None
    cache_lost_tokens: int = 0
    cache_divergence: Divergence | None = None

    def __post_init__(self) -> None:
        assert self.cached_tokens + self.new_prefill_tokens == self.prompt_tokens
        assert (self.cached_tokens > 0) == (self.cache_source is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)


@dataclass(frozen=True)
class StreamMetrics:
    """How evenly one answer came, and what its prompt cost the others.

    Attributes:
        itl_target_s: Longest gap between tokens that was aimed at; None without one.
        itl_p50_s, itl_p99_s, itl_worst_s: Gaps between tokens; None before the second
            token.
        itl_misses: Gaps longer than the target.
        stall_suffered_s: Time this answer waited for spans of other prompts.
        stall_caused_s: Time in spans of this prompt while at least one answer waited.
    """

    itl_target_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    itl_worst_s: float | None
    itl_misses: int
    stall_suffered_s: float
    stall_caused_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-ready dict."""
        return asdict(self)


@dataclass
class PrefillClock:
    """Collects a ``PrefillMetrics``. All times are ``time.perf_counter()`` seconds."""

    prompt_tokens: int
    arrival_s: float
    start_s: float = 0.0
    end_s: float = 0.0
    first_token_s: float | None = None
    restore_s: float = 0.0
    compute_s: float = 0.0
    cached_tokens: int = 0
    source: str | None = None
    miss_reason: str | None = None
    lost_tokens: int = 0
    divergence: Divergence | None = None
    span_tokens: list[int] = field(default_factory=list)

    def restored(
        self,
        cached_tokens: int,
        seconds: float,
        miss_reason: str | None,
        lost_tokens: int = 0,
        divergence: Divergence | None = None,
    ) -> None:
        """Record what the SessionBank gave back, why no more, and what finding it took."""
        self.cached_tokens = cached_tokens
        self.restore_s = seconds
        self.miss_reason = miss_reason
        self.lost_tokens = lost_tokens
        self.divergence = divergence

    def computed(self, tokens: int, seconds: float) -> None:
        """Record one span that the model has computed."""
        self.span_tokens.append(tokens)
        self.compute_s += seconds

    def metrics(self) -> PrefillMetrics:
        """Return the finished value. Call once the prompt is complete."""
        new_tokens = self.prompt_tokens - self.cached_tokens
        assert sum(self.span_tokens) == new_tokens
        prefill_s = self.end_s - self.start_s
        return PrefillMetrics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            new_prefill_tokens=new_tokens,
            prefill_tok_s=_rate(new_tokens, prefill_s),
            prefill_compute_tok_s=_rate(new_tokens, self.compute_s),
            queue_s=self.start_s - self.arrival_s,
            cache_restore_s=self.restore_s,
            prefill_s=prefill_s,
            ttft_s=(
                None if self.first_token_s is None else self.first_token_s - self.arrival_s
            ),
            prefill_chunks=len(self.span_tokens),
            prefill_chunk_size=max(self.span_tokens, default=0),
            cache_source=(self.source or "memory") if self.cached_tokens else None,
            cache_miss_reason=self.miss_reason,
            cache_lost_tokens=self.lost_tokens,
            cache_divergence=self.divergence,
        )


def _rate(amount: int, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
