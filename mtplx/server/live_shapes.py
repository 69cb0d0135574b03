"""The shapes of the live view's events. Pure; any thread."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from mtplx.types import EngineStatus, LiveIteration


class LiveOpenRequest(TypedDict):
    """A request that waits or runs."""

    id: str
    model: str
    prompt_tokens: int
    arrival_s: float


class LiveRequest(TypedDict):
    """A request that is over. ``why`` says why no more of its prompt was restored; what
    is absent was never reached. The other names are those of the answer's ``mtplx``."""

    id: str
    model: str
    end_s: float
    outcome: str
    total_s: float
    completion_tokens: int
    prompt_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]
    new_prefill_tokens: NotRequired[int]
    prefill_tok_s: NotRequired[float | None]
    ttft_s: NotRequired[float | None]
    why: NotRequired[str]
    itl_target_s: NotRequired[float | None]
    itl_p50_s: NotRequired[float | None]
    itl_worst_s: NotRequired[float | None]
    itl_misses: NotRequired[int]


class LiveBankNode(TypedDict):
    """A run of tokens that the SessionBank holds; ``parent`` is the index of the run
    before it. ``text`` is what its first tokens say, null where that is not yours to
    read; ``age`` counts the uses of the bank since its last."""

    parent: int | None
    model: str | None
    start: int
    end: int
    text: str | None
    bytes: int
    snapshots: list[int]
    uses: int
    age: int
    pinned: bool
    children: int


class LiveBank(TypedDict):
    """The prefix tree, or the part of it that most is to be seen of."""

    nodes: list[LiveBankNode]
    left_out: int


class LiveEvent(TypedDict):
    """An event of ``GET /v1/live``, with the field that its ``type`` names (``state`` has
    two). All times are seconds on one clock, on which it was ``now_s`` when the event was
    sent. ``missed`` counts iterations that the client was too slow for."""

    type: Literal["state", "iterations", "bank", "requests"]
    now_s: float
    engine: NotRequired[EngineStatus]
    open: NotRequired[list[LiveOpenRequest]]
    iterations: NotRequired[list[LiveIteration]]
    missed: NotRequired[int]
    bank: NotRequired[LiveBank]
    requests: NotRequired[list[LiveRequest]]
