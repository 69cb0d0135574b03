"""A property has its type beside it wherever its schema tells only one."""

from __future__ import annotations

import pytest

from mtplx.text.plain_tools import plain_property, plain_tools

PARAMETERS = {
    "$defs": {
        "color": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 1},
        "loop": {"$ref": "#/$defs/loop"},
        "a/b": {"type": "number"},
    }
}


@pytest.mark.parametrize(
    ("schema", "type_"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"type": ["integer", "string"]}, ["integer", "string"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "boolean"),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "integer"),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}]}, None),
        ({"allOf": [{"$ref": "#/$defs/count"}], "default": 1}, "integer"),
        ({"$ref": "#/$defs/color"}, "string"),
        ({"$ref": "#/$defs/a~1b"}, "number"),
        ({"const": "x"}, "string"),
        ({"enum": ["x", 1]}, None),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": 7, "anyOf": 7, "enum": 7}, None),
        ({}, None),
        (True, None),
    ],
)
def test_the_one_type_of_a_property(schema, type_):
    assert plain_property(schema, PARAMETERS).get("type") == type_


def test_what_stands_beside_a_reference_is_kept():
    plain = plain_property({"$ref": "#/$defs/count", "minimum": 3}, PARAMETERS)
    assert plain == {"type": "integer", "minimum": 3}


@pytest.mark.parametrize("parameters", [None, {}, [], {"properties": 1}])
def test_every_function_has_parameters(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    (plain,) = plain_tools([tool])
    assert plain["function"]["parameters"]["properties"] == {}
    assert tool["function"]["parameters"] == parameters
