"""JSON Schemas that an answer can be held to.

Decides which schemas are refused, and finds the place in them to tell; llguidance knows
what it can enforce and what nothing can match. Also decides how constrained JSON is laid
out. Pure; any thread. A large schema takes long: not for the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from llguidance import LLMatcher

from mtplx.errors import InvalidRequestError
from mtplx.text.lark import check

# At most one space, where models write one: a small model that may write any whitespace
# does not stop.
_LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# Definitions first: an error is theirs, not the reference's that leads there.
_OF_NAMES = ("$defs", "definitions", "properties", "patternProperties")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_OF_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames")
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$comment", "x-guidance"}
)
_BOUNDS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"enum", "const", "multipleOf", "allOf", "anyOf", "oneOf", "$ref"}
)
_UNSUPPORTED = "Unimplemented keys: "
_IMPOSSIBLE = "Unsatisfiable schema: "
_OVERLAPPING = "oneOf constraints are not supported"
_REQUIRED = re.compile(r"required property '(.*)' is unsatisfiable")
# llguidance has a year 0, and a 29th of February in every year; readers of dates refuse
# both.
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_REAL_DATE = (
    r"^((\d{3}[1-9]|\d\d[1-9]0|\d[1-9]00|[1-9]000)-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    rf"|(\d\d{_LEAP}|{_LEAP}00)-02-29)"
)
# Checks that the place of an error may cost.
_MOST_CHECKS = 300


def prepare_schema(schema: Any, *, strict: bool = True, param: str) -> dict[str, Any]:
    """Return the schema as llguidance is to read it.

    Objects whose schema names their properties, and does not say that there may be
    others, get no others: a small model would invent them until its tokens run out.
    Dates are days that the calendar has.

    Args:
        schema: As the client sent it.
        strict: Refuse a ``oneOf`` whose branches may overlap; otherwise it is read as
            ``anyOf``.
        param: Where it was sent, for errors.

    Raises:
        InvalidRequestError: It is no schema, nothing can match it, or it uses a keyword
            that cannot be enforced.
    """
    if schema is True:
        schema = {}
    try:
        error = _check(schema, strict)
        if error:
            raise InvalidRequestError(_explain(schema, error, strict), param=param)
        prepared = _with_bounded_integers(_with_real_dates(_closed(schema)))
        if _check(prepared, strict):
            prepared = deepcopy(schema)
    except RecursionError as error:
        raise InvalidRequestError(
            "The JSON schema is nested too deeply. Send a flatter one.", param=param
        ) from error
    prepared["x-guidance"] = _options(strict)
    return prepared


def _options(strict: bool) -> dict[str, Any]:
    return {**_LAYOUT, "coerce_one_of": not strict}


def _check(schema: Any, strict: bool) -> str:
    """Return why the schema cannot be used; empty if it can."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _options(strict)}
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except (TypeError, ValueError) as error:
        return str(error)
    return " ".join(check(grammar)[0].split())


def _explain(schema: Any, error: str, strict: bool) -> str:
    pointer, part, error = _locate(schema, error, strict)
    where = f"at {pointer}"
    if isinstance(part, Mapping) and (keys := sorted(part.keys() - _ANNOTATIONS)):
        where += f" ({', '.join(keys[:8])})"
    if error.startswith(_UNSUPPORTED):
        names = ", ".join(json.loads(error.removeprefix(_UNSUPPORTED)))
        return (
            f"The JSON schema uses {names} {where}, which constrained answers do not "
            "support. Leave it out, and check it in the answer instead."
        )
    if error.startswith(_OVERLAPPING):
        return (
            f"The JSON schema uses oneOf {where} with branches that may overlap, which "
            "constrained answers do not support. Use anyOf."
        )
    if error.startswith(_IMPOSSIBLE):
        reason = error.removeprefix(_IMPOSSIBLE)
        return f"Nothing can match the JSON schema {where}: {reason}. Correct the schema."
    return f"The JSON schema cannot be used {where}: {error[:300]}. Correct the schema."


def _locate(schema: Any, error: str, strict: bool) -> tuple[str, Any, str]:
    """The JSON pointer of the smallest part that fails so, the part, and its error."""
    shared = {}
    if isinstance(schema, Mapping):
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pointer, checks = "#", 0
    while checks < _MOST_CHECKS:
        required = _REQUIRED.search(error)
        culprit = f"properties/{required[1]}" if required else None
        for step, part in _parts(schema):
            if not isinstance(part, Mapping):
                continue
            checks += 1
            found = _check({**shared, **part}, strict)
            if found and (found == error or step == culprit):
                pointer, schema, error = f"{pointer}/{step}", part, found
                break
        else:
            break
    return pointer, schema, error


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy that allows no properties but the named ones."""
    closed: dict[str, Any] = deepcopy(dict(schema))
    parts = list(_all_parts(closed))
    # Where several schemas describe one object, each names only some of its properties.
    if any(
        "allOf" in part
        or ("properties" in part and part.keys() & {"$ref", "anyOf", "oneOf"})
        for part in parts
    ):
        return closed
    for part in parts:
        names = part.get("properties")
        if (
            isinstance(names, dict)
            and not part.keys() & {"additionalProperties", "patternProperties"}
            and set(part.get("required", ())) <= names.keys()
        ):
            part["additionalProperties"] = False
    return closed


def _with_real_dates(schema: dict[str, Any]) -> dict[str, Any]:
    for part in _all_parts(schema):
        if part.get("format") in ("date", "date-time"):
            part["allOf"] = [*part.get("allOf", ()), {"pattern": _REAL_DATE}]
    return schema


def _with_bounded_integers(schema: dict[str, Any]) -> dict[str, Any]:
    """Hold integers without bounds to those that every JSON reader keeps exact (RFC 7493,
    section 2.2): a small model that may write any number of digits does not stop."""
    for part in _all_parts(schema):
        if part.get("type") == "integer" and not part.keys() & _BOUNDS:
            part.update(minimum=1 - 2**53, maximum=2**53 - 1)
    return schema


def _all_parts(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for _, part in _parts(schema):
            yield from _all_parts(part)


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas directly inside this one, and where they are."""
    if not isinstance(schema, Mapping):
        return
    for keyword in _OF_NAMES:
        if isinstance(schema.get(keyword), Mapping):
            for name, part in schema[keyword].items():
                yield f"{keyword}/{name}", part
    for keyword in _OF_LISTS:
        if isinstance(schema.get(keyword), list):
            for index, part in enumerate(schema[keyword]):
                yield f"{keyword}/{index}", part
    for keyword in _OF_ONE:
        if isinstance(schema.get(keyword), Mapping):
            yield keyword, schema[keyword]
