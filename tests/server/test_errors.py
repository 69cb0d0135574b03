"""The table of errors is complete."""

from __future__ import annotations

import inspect

import pytest

from mtplx import errors
from mtplx.server.errors import TABLE, error_body, error_headers, row_of


def test_every_error_has_a_row() -> None:
    ours = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, errors.MtplxError)
    }
    assert set(TABLE) == ours
    assert all(400 <= row.status < 600 and row.type for row in TABLE.values())


def test_request_errors_are_4xx_and_others_are_not_400() -> None:
    for cls, row in TABLE.items():
        assert (row.status < 500) == (
            issubclass(
                cls,
                errors.RequestError | errors.QueueFullError | errors.DeadlineExceededError,
            )
        ), cls


def test_a_default_code_is_the_one_of_the_class() -> None:
    for cls, row in TABLE.items():
        if issubclass(cls, errors.RequestError):
            assert row.code == cls.code


def test_a_subclass_takes_the_row_of_its_base() -> None:
    class OutOfTreeError(errors.ContextLengthError):
        pass

    assert row_of(OutOfTreeError("x")) is TABLE[errors.ContextLengthError]


def test_own_code_and_param_win() -> None:
    error = errors.InvalidRequestError("No.", param="a[0]", code="special")
    assert error_body(error) == {
        "error": {
            "message": "No.",
            "type": "invalid_request_error",
            "param": "a[0]",
            "code": "special",
        }
    }


@pytest.mark.parametrize(("wait_s", "header"), [(0.0, "1"), (0.2, "1"), (1.2, "2")])
def test_retry_after_is_whole_seconds(wait_s: float, header: str) -> None:
    error = errors.QueueFullError("Full.", retry_after_s=wait_s)
    assert error_headers(error) == {"Retry-After": header}
