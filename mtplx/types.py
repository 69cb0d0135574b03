"""The values that cross from the server to the engine and back.

Plain frozen dataclasses, no MLX. A request goes in whole; events come back, and the
last one, exactly one per request, is ``Finished`` or ``Failed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy.typing as npt

from mtplx.errors import MtplxError
from mtplx.metrics import PrefillMetrics, StreamMetrics

FinishReason = Literal["stop", "length", "cancelled"]

Progress = Callable[[str, float | None], None]
"""Told, while something long runs, what is being done and the fraction done in [0, 1]
(None where unknown)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    The bias is added to the logits first; then come the penalties, a grammar removes
    what it forbids, and temperature scales the rest. ``top_k``, ``top_p`` and ``min_p``
    each remove tokens of these; one of those left is drawn. Temperature 0 takes the most
    likely token.

    Attributes:
        temperature: 0 or more.
        top_p: Keep the smallest set of tokens whose probability reaches this, (0, 1].
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Drop tokens below this share of the most likely one, [0, 1].
        seed: Makes the draw repeatable; None draws a fresh one.
        repetition_penalty: Divides (multiplies, if negative) the logits of tokens in
            the prompt and the answer; 1 does nothing (arXiv:1909.05858).
        presence_penalty: Subtracted once from tokens of the answer.
        frequency_penalty: Subtracted for each occurrence in the answer.
        logit_bias: Pairs of token id and what is added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        token_ids: The prompt, a flat run of token ids.
        edges: Indices where state is worth keeping (end of the system block, of a
            message, just before the generation header). They become mandatory edges of
            the plan where the model's state cannot be cut later.
        stable_prefix_len: Length of the longest prefix that the next turn of this
            conversation is sure to begin with; 0 when unknown.
        text: What was tokenized, special tokens written out; empty where there was none.
        edge_chars: Where in ``text`` the edges are.
    """

    token_ids: tuple[int, ...]
    edges: tuple[int, ...] = ()
    stable_prefix_len: int = 0
    text: str = field(default="", repr=False, compare=False)
    edge_chars: tuple[int, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class GenerationRequest:
    """One request to the engine.

    Attributes:
        request_id: Unique among the requests in flight.
        prompt: What to read; at least one token.
        max_new_tokens: Most tokens to generate; 0 only reads the prompt.
        arrival_s: ``time.perf_counter()`` when the request reached the server.
        sampling: How tokens are chosen.
        stop: Strings that end the answer; they are not part of it.
        ignore_eos: Do not stop at the model's end tokens (benchmarks).
        deadline_s: ``time.perf_counter()`` after which the request is ended with an
            error; None never does.
        logprobs: How many of the most likely tokens are told for each token of the
            answer, besides the token itself; None tells nothing.
        prompt_logprobs: Tell the same for the prompt. Nothing is restored then, since
            every token's logits are needed.
        grammar: What the answer must match, as ``mtplx.text.grammar`` makes it; None
            leaves it free.
        namespace: State is shared only with requests of the same one.
        model: Name of the model that answers; empty takes the engine's first.
    """

    request_id: str
    prompt: Prompt
    max_new_tokens: int
    arrival_s: float
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    deadline_s: float | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str | None = None
    namespace: str = ""
    model: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, by the model alone: before all that ``SamplingParams`` and
    a grammar do to it.

    Attributes:
        token_id: The token.
        logprob: Natural logarithm of its probability.
        top: The most likely tokens with theirs, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PrefillProgress:
    """How far a prompt has been read; sent when it starts and after every span."""

    done_tokens: int
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class PromptLogprobs:
    """One entry for each prompt token, None for the first; sent before any text."""

    tokens: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer. ``text`` may be empty while a character or a possible
    stop string is still incomplete; ``token_ids`` are the tokens sampled since the
    last delta, and ``logprobs`` theirs where they were asked for."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The request ended as it should.

    Attributes:
        reason: ``stop`` (end token or stop string), ``length`` (``max_new_tokens`` or
            the context reached) or ``cancelled``.
        completion_tokens: Tokens sampled, the end token included.
        metrics: None when the prompt was not complete (cancelled before).
        stream: None where there is no ``metrics``.
        stop_text: The stop string that ended the answer; None where none did.
    """

    reason: FinishReason
    completion_tokens: int
    metrics: PrefillMetrics | None
    stream: StreamMetrics | None = None
    stop_text: str | None = None


@dataclass(frozen=True)
class Failed:
    """The request ended with an error; other requests are not affected."""

    error: MtplxError


Event = PrefillProgress | PromptLogprobs | TextDelta | Finished | Failed


@dataclass(frozen=True)
class StateKey:
    """What KV state must agree on before it can be shared.

    Attributes:
        fingerprint: Equal only for models that compute the same.
        any_prefix: True when state can be cut at every token; False when it can be
            resumed at snapshots only.
        namespace: Whose it is; empty where everybody shares.
    """

    fingerprint: str
    any_prefix: bool
    namespace: str = ""


@dataclass(frozen=True)
class HostState:
    """KV state in host memory, in the form that goes to disk.

    Attributes:
        arrays: By name; dtypes that numpy lacks are viewed as integers of their size.
        meta: What is needed to build the state from them again.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


@dataclass(frozen=True)
class PrefillForecast:
    """What reading a prompt would take now. Nothing was read, restored or pinned for it.

    Attributes:
        prompt_tokens: Length of the prompt.
        memory_tokens: Tokens whose state would be restored from memory.
        disk_tokens: Tokens after these that would be restored from disk.
        miss_reason: Why no more would be, as in ``PrefillMetrics``.
        spans: ``(start, end)`` of what would be computed, were no other request there.
        edges: Mandatory edges: where a span must end.
        snapshots: Where state would be kept that cannot be cut later.
        kv_bytes: Bytes of the state of the whole prompt.
        seconds: Expected for restoring and computing, were no other request there; None
            before anything was measured.
        seconds_error: Share by which such an expectation is usually off; None as above.
    """

    prompt_tokens: int
    memory_tokens: int
    disk_tokens: int
    miss_reason: str | None
    spans: tuple[tuple[int, int], ...]
    edges: tuple[int, ...]
    snapshots: tuple[int, ...]
    kv_bytes: int
    seconds: float | None
    seconds_error: float | None


@dataclass(frozen=True)
class ModelInfo:
    """What the server tells about the loaded model.

    Attributes:
        name: The name clients use.
        context_length: Most tokens of prompt and answer together.
        vocab_size: Rows of the output layer.
        device: ``cpu`` or ``gpu``.
        dtype: Of the activations, ``float32`` say.
        cache_kinds: How many layers have each kind of cache
            (``trimmable``, ``windowed``, ``recurrent``).
        fingerprint: Equal only for models that compute the same.
        backend: Library behind the matrix products, for humans.
        created: Unix time at which the model was loaded.
    """

    name: str
    context_length: int
    vocab_size: int
    device: str
    dtype: str
    cache_kinds: dict[str, int]
    fingerprint: str
    backend: str
    created: int


ITL_BOUNDS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Where gaps between tokens are counted, in seconds, ascending."""


@dataclass(frozen=True)
class ItlSummary:
    """Gaps between tokens over all streams of an engine. ``p50_s`` and ``p99_s`` are of
    the most recent gaps, the rest of all; seconds are None before the first gap.

    Attributes:
        gaps: How many were recorded.
        target_s: The latest target, None where there is none.
        misses: Gaps longer than the target of their moment.
        total_s: Of all gaps together.
        within: How many were no longer than each of ``ITL_BOUNDS_S``; empty where that
            was not counted.
    """

    gaps: int = 0
    target_s: float | None = None
    p50_s: float | None = None
    p99_s: float | None = None
    worst_s: float | None = None
    misses: int = 0
    total_s: float = 0.0
    within: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiskStats:
    """A moment of the disk tier. Counts are since it was opened, where not said.

    Attributes:
        bytes: All that is in the folder now.
        files: Files with state, rows and snapshots, in the folder now.
        segments: Runs of tokens in the folder now.
        queue_bytes: State waiting to be written now.
        hits: Fetches that restored something.
        misses: Fetches that restored nothing.
        restored_tokens: Tokens that fetches restored.
        bytes_read: By fetches.
        bytes_written: State written.
        bytes_written_today: State written in the last 24 hours, by earlier processes
            too.
        dropped: Pieces that were not written, by reason: ``queue_full``,
            ``daily_budget``, ``disk_full``, ``write_error``, ``too_large``, ``stale``
            (what it continues is no longer there) or ``closed``.
        quarantined: Files found bad and set aside.
        evicted: Segments removed to make room.
        orphans: Files without an entry that were removed when the folder was opened.
    """

    bytes: int
    files: int
    segments: int
    queue_bytes: int
    hits: int
    misses: int
    restored_tokens: int
    bytes_read: int
    bytes_written: int
    bytes_written_today: int
    dropped: Mapping[str, int]
    quarantined: int
    evicted: int
    orphans: int


@dataclass(frozen=True)
class EngineStatus:
    """A moment of the engine, readable from any thread without waiting for it.

    Attributes:
        alive: The engine thread runs.
        waiting: Requests that have not started.
        running: Requests that have started and not ended.
        iterations: Iterations so far.
        batch_mode: How parts of a step share a forward (``packed``, ``mixer`` or
            ``rows``).
        batch_fallback_reason: Why it is one of the slow ones, why streams of like length
            do not lie together, or why forwards are not replayed; None where all is as
            fast as can be.
        overlapped_steps: Decodes that began before the tokens of the last one were read.
        chunked_prefill: Prompts are read in spans.
        chunked_prefill_reason: Why they are not; None where they are.
        itl: Gaps between the tokens of all streams.
        step_cost: What a step is expected to cost, in seconds, as learned so far.
        bank_tokens, bank_bytes, bank_entries: What the SessionBank holds.
        bank_evictions: Nodes removed to make room, so far.
        bank_thinned: Snapshots removed to make room, so far.
        bank_too_large: Times that state was not kept because it did not fit.
        cache_misses: How often each reason for not restoring more occurred.
        kv_limit_bytes: Most bytes of KV state; None without a limit.
        kv_running_bytes: Of ``bank_bytes`` those that running requests hold.
        pinned: Leases that running requests hold in the bank.
        step_error: How far steps are from what was expected of them: the median over
            recent ones of abs(measured / expected - 1); None before the first.
        disk: The disk tier; None where there is none.
    """

    alive: bool
    waiting: int = 0
    running: int = 0
    iterations: int = 0
    batch_mode: str = "rows"
    batch_fallback_reason: str | None = None
    overlapped_steps: int = 0
    chunked_prefill: bool = True
    chunked_prefill_reason: str | None = None
    itl: ItlSummary = ItlSummary()
    step_cost: dict[str, float] = field(default_factory=dict)
    bank_tokens: int = 0
    bank_bytes: int = 0
    bank_entries: int = 0
    bank_evictions: int = 0
    bank_thinned: int = 0
    bank_too_large: int = 0
    cache_misses: dict[str, int] = field(default_factory=dict)
    kv_limit_bytes: int | None = None
    kv_running_bytes: int = 0
    pinned: int = 0
    step_error: float | None = None
    disk: DiskStats | None = None


@dataclass(frozen=True)
class LiveSpan:
    """A span that an iteration was to compute. ``seconds`` is None where that failed, and
    0 where it shared the forward of the streams' tokens."""

    request_id: str
    start: int
    end: int
    is_tail: bool
    shared: bool
    seconds: float | None


@dataclass(frozen=True)
class LiveIteration:
    """An iteration that is over, for who watches the engine.

    Attributes:
        number: Counts those of its model.
        model: Whose it was.
        begin_s: ``time.perf_counter()`` before it.
        took_s: Seconds until its last event was out.
        decode_s: Seconds of it until the streams had their tokens; None without streams.
        decoding: The streams that got a token each.
        gaps_s: Of each of ``decoding``, since the token before; None where that was
            before anybody watched, or where the token comes with the next step.
        spans: Of prompts, in their order.
        target_s: Gap that was aimed at; None without stream or target.
        predicted_s: What it was expected to take.
        why: What ended the choice of spans.
    """

    number: int
    model: str
    begin_s: float
    took_s: float
    decode_s: float | None
    decoding: tuple[str, ...]
    gaps_s: tuple[float | None, ...]
    spans: tuple[LiveSpan, ...]
    target_s: float | None
    predicted_s: float
    why: str


LiveSink = Callable[[LiveIteration], None]
"""Called on the engine thread for each iteration; must not block."""


@dataclass(frozen=True)
class BankNode:
    """One run of tokens that the SessionBank holds.

    Attributes:
        parent: Index of the run before it among the nodes of the view; None for one that
            begins a prompt.
        fingerprint, namespace: Of its ``StateKey``.
        start, end: Its tokens, as indices of the prompts that pass through it.
        first_tokens: The first few of them.
        nbytes: Of its rows and snapshots.
        snapshots: Where it can be resumed, for state that cannot be cut.
        uses: How often a request restored it.
        age: How many uses of the bank ago it was last used.
        pinned: It is never evicted, or in use now.
        children: How many runs follow it, those that are left out too.
    """

    parent: int | None
    fingerprint: str
    namespace: str
    start: int
    end: int
    first_tokens: tuple[int, ...]
    nbytes: int
    snapshots: tuple[int, ...]
    uses: int
    age: int
    pinned: bool
    children: int


@dataclass(frozen=True)
class BankView:
    """The prefix tree of the SessionBank, or the part of it that most is to be seen of.

    Attributes:
        nodes: Each one behind its parent.
        left_out: How many others there are.
    """

    nodes: tuple[BankNode, ...] = ()
    left_out: int = 0
