"""The response object: OpenAI's, exactly, plus ``mtplx``. Pure; any thread."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from mtplx.errors import MtplxError, QueueFullError, RequestError
from mtplx.server.errors import row_of
from mtplx.server.responses import report
from mtplx.server.responses_api.body import JsonSchema, ResponseBody, TextFormat
from mtplx.server.turn import TurnEnd

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class InputTokensDetails(TypedDict):
    """Where the prompt's state came from. Nothing is paid for being kept, so
    ``cache_write_tokens`` is 0."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """What the answer's tokens were."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str
    param: str | None
    type: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    """Answer of ``POST /v1/responses``, and in the first and last events of its stream.
    ``mtplx`` is a ``PrefillMetrics``, with the gaps between tokens."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    completed_at: int | None
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_diagnostics: NotRequired[dict[str, Any]]
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    mtplx: NotRequired[dict[str, Any]]


class ResponseEvent(TypedDict):
    """An event of the stream of ``POST /v1/responses``. Besides, each type of them has
    fields of its own."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]


class InputTokenCount(TypedDict):
    """Answer of ``POST /v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    """Answer of ``DELETE /v1/responses/{response_id}``."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """Answer of ``GET /v1/responses/{response_id}/input_items``."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


def new_response(
    body: ResponseBody, *, response_id: str, model: str, created_at: int
) -> ResponseObject:
    """Return the response to ``body`` as it is before anything was generated."""
    choice = body.tool_choice
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": _format(body.text.format)},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools],
        "top_logprobs": body.top_logprobs,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def ended(
    response: ResponseObject,
    output: list[dict[str, Any]],
    end: TurnEnd,
    *,
    cut_off: bool,
    now: int,
) -> ResponseObject:
    """Return ``response`` after its turn has ended well, or was ``cut_off`` at its most
    tokens."""
    return {
        **response,
        "status": "incomplete" if cut_off else "completed",
        "completed_at": None if cut_off else now,
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": output,
        "usage": _usage(end),
        "mtplx": report(end.finished),
    }


def failed(
    response: ResponseObject, output: list[dict[str, Any]], error: MtplxError
) -> ResponseObject:
    """Return ``response`` after its turn has failed with ``error``."""
    return {**response, "status": "failed", "output": output, "error": _error(error)}


def _format(form: TextFormat) -> dict[str, Any]:
    if isinstance(form, JsonSchema):
        return form.model_dump(by_alias=True)
    return form.model_dump()


def _usage(end: TurnEnd) -> ResponseUsage:
    metrics = end.finished.metrics
    assert metrics is not None  # Only a cancelled turn has none.
    output_tokens = end.finished.completion_tokens
    return {
        "input_tokens": metrics.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": metrics.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": metrics.prompt_tokens + output_tokens,
    }


def _error(error: MtplxError) -> ResponseError:
    request = error if isinstance(error, RequestError) else None
    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
    if request is not None:
        code = "invalid_prompt"
    elif isinstance(error, QueueFullError):
        code = "rate_limit_exceeded"
    return {
        "code": code,
        "message": str(error),
        "param": None if request is None else request.param,
        "type": row_of(error).type,
    }
