"""The routes of ``/v1/responses``. Runs on the event loop."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from mtplx.errors import InvalidRequestError, UnsupportedFieldError
from mtplx.server.access import RequestRecord
from mtplx.server.fields import shown
from mtplx.server.openapi import describe, failures
from mtplx.server.responses import json_response
from mtplx.server.responses_api.body import ResponseBody
from mtplx.server.responses_api.create import count_input_tokens, create_response
from mtplx.server.responses_api.shapes import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ResponseEvent,
    ResponseObject,
)
from mtplx.server.responses_api.store import Item, ResponseStore
from mtplx.server.service import Service

_PATH = "/v1/responses"
_ONE = f"{_PATH}/{{response_id}}"
_ERRORS = failures((400, 401, 403, 404, 500, 503))
# What may be done with a stored response, by the names of the endpoints.
_LINKS = {
    name: {"operationId": name, "parameters": {"response_id": "$response.body#/id"}}
    for name in (
        "retrieve_response",
        "list_input_items",
        "cancel_response",
        "delete_response",
    )
}
_MAX_PAGE = 100
_LIST_QUERY = [
    ("after", {"type": "string"}),
    ("limit", {"type": "integer", "minimum": 1, "maximum": _MAX_PAGE, "default": 20}),
    ("order", {"enum": ["asc", "desc"], "default": "desc"}),
]


def add_routes(app: FastAPI, service: Service, store: ResponseStore | None = None) -> None:
    """Add the routes to ``app``. The responses are in ``store``, by default a new one."""
    routes = _Routes(service, ResponseStore() if store is None else store)
    answers = describe(ResponseBody, ResponseObject, events=ResponseEvent, links=_LINKS)
    app.post(_PATH, **answers)(routes.create_response)
    app.post(f"{_PATH}/input_tokens", **describe(ResponseBody, InputTokenCount))(
        routes.count_input_tokens
    )
    app.get(_ONE, response_model=ResponseObject, responses=_ERRORS)(
        routes.retrieve_response
    )
    app.delete(_ONE, response_model=DeletedResponse, responses=_ERRORS)(
        routes.delete_response
    )
    app.post(f"{_ONE}/cancel", response_model=ResponseObject, responses=_ERRORS)(
        routes.cancel_response
    )
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in _LIST_QUERY
    ]
    app.get(
        f"{_ONE}/input_items",
        response_model=ItemList,
        responses=_ERRORS,
        openapi_extra={"parameters": parameters},
    )(routes.list_input_items)


class _Routes:
    """The endpoints, and the store that they share."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def create_response(self, request: Request) -> Response:
        """Answer; with `stream` as server-sent events."""
        return await create_response(self._service, self._store, request)

    async def count_input_tokens(self, request: Request) -> Response:
        """Tell the length of the prompt, without reading it."""
        return await count_input_tokens(self._service, self._store, request)

    async def retrieve_response(self, request: Request, response_id: str) -> Response:
        """Return a stored response."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedFieldError(
                "A stored response is not streamed; leave `stream` out.", param="stream"
            )
        return json_response(self._store.get(response_id, _owner(request)).body)

    async def delete_response(self, request: Request, response_id: str) -> Response:
        """Forget a stored response."""
        self._store.delete(response_id, _owner(request))
        answer: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return json_response(answer)

    async def cancel_response(self, request: Request, response_id: str) -> Response:
        """Refuse: only background responses can be cancelled, and there are none."""
        self._store.get(response_id, _owner(request))
        raise InvalidRequestError(
            "Only a background response can be cancelled, and this one has ended. To end "
            "one that runs, close its connection.",
            param="response_id",
            code="response_not_cancellable",
        )

    async def list_input_items(self, request: Request, response_id: str) -> Response:
        """List what a stored response read, earlier responses included."""
        items = self._store.get(response_id, _owner(request)).read
        return json_response(_page(items, dict(request.query_params)))


def _owner(request: Request) -> str | None:
    return RequestRecord.of(request).api_key_id


def _page(items: tuple[Item, ...], query: dict[str, str]) -> ItemList:
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError("`order` must be asc or desc.", param="order")
    limit = query.get("limit", "20")
    if not (limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= _MAX_PAGE):
        raise InvalidRequestError(
            f"`limit` must be a number from 1 to {_MAX_PAGE}, not {shown(limit)}.",
            param="limit",
        )
    ordered = [dict(item) for item in (items if order == "asc" else reversed(items))]
    start = 0
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequestError(
                f"`after` names no item of this response: {shown(after)}.", param="after"
            )
        start = ids.index(after) + 1
    page = ordered[start : start + int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": start + len(page) < len(ordered),
    }
