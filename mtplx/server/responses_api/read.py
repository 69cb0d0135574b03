"""What a response reads: earlier items and new ones, and the turn they make.

``read_items`` runs on the event loop, which owns the store; ``turn_request`` on any
thread but that one, since a schema can take long.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtplx.errors import InvalidRequestError
from mtplx.server.chat_body import template_kwargs
from mtplx.server.responses_api.body import AnyJson, JsonSchema, ResponseBody, TextFormat
from mtplx.server.responses_api.history import chat_messages
from mtplx.server.responses_api.items import ItemReference
from mtplx.server.responses_api.store import Item, ResponseStore
from mtplx.server.turn import TurnRequest
from mtplx.text.grammar import json_object_grammar, json_schema_grammar
from mtplx.types import SamplingParams


def read_items(
    body: ResponseBody, store: ResponseStore, *, owner: str | None, name: str
) -> tuple[Item, ...]:
    """Return the conversation up to the answer, as wire items.

    Args:
        body: Names the response to go on from, and brings what is new.
        store: Has the former.
        owner: The API key of the request.
        name: Unique; the ids of new items contain it.

    Raises:
        ResponseNotFoundError: A response or an item is named that is not in the store.
        InvalidRequestError: The output of a call that was not made.
    """
    items: list[Item] = []
    if body.previous_response_id is not None:
        what = "previous_response"
        earlier = store.get(
            body.previous_response_id, owner, param=f"{what}_id", code=f"{what}_not_found"
        )
        items += earlier.items
    made = {call_id for item in items if (call_id := _call_made(item))}
    for index, new in enumerate(body.input):
        path = f"input[{index}]"
        if isinstance(new, ItemReference):
            item = store.item(new.id, owner, param=f"{path}.id")
        else:
            item = new.wire(f"{name}i{index:02x}")
        if item["type"] == "function_call_output" and item["call_id"] not in made:
            raise _no_call(item["call_id"], path)
        if call_id := _call_made(item):
            made.add(call_id)
        items.append(item)
    return tuple(items)


def turn_request(body: ResponseBody, items: Sequence[Item], namespace: str) -> TurnRequest:
    """Return the turn that answers ``items``.

    Raises:
        InvalidRequestError: The schema of the answer cannot be used.
    """
    messages = chat_messages(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    prewarm = body.prompt_cache_options.prewarm
    return TurnRequest(
        messages=messages,
        tools=[tool.as_chat() for tool in body.tools],
        tool_choice=body.choice(),
        parallel_tool_calls=body.parallel_tool_calls,
        grammar=_grammar(body.text.format),
        template_kwargs=template_kwargs(body.reasoning.effort),
        sampling=SamplingParams(temperature=body.temperature, top_p=body.top_p),
        max_new_tokens=0 if prewarm else body.max_output_tokens,
        logprobs=body.logprobs(),
        namespace=namespace,
        param="input",
    )


def _call_made(item: Item) -> str | None:
    made = item["type"] == "function_call" and item["status"] != "incomplete"
    return item["call_id"] if made else None


def _no_call(call_id: str, path: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"No function call with `call_id` {call_id[:200]!r} comes before its output. Send "
        "the call too, or name the response that made it in `previous_response_id`.",
        param=f"{path}.call_id",
    )


def _grammar(form: TextFormat) -> str | None:
    if isinstance(form, JsonSchema):
        return json_schema_grammar(
            form.schema_, strict=form.strict, param="text.format.schema"
        )
    return json_object_grammar() if isinstance(form, AnyJson) else None
