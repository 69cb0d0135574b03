"""The names of cases, and the modes that fit them."""

from __future__ import annotations

import pytest

from mtplx.errors import ConfigError
from mtplx.prefill_bench import Case, parse_cases, parse_modes


def test_names_as_llama_bench_has_them():
    assert parse_cases("pp512, pp1k,PP512@d8192,pp2K@d4k") == [
        Case(512),
        Case(1024),
        Case(512, 8192),
        Case(2048, 4096),
    ]
    for name in ("pp512", "pp512@d8192"):
        assert [str(case) for case in parse_cases(name)] == [name]


@pytest.mark.parametrize(
    "wrong", ["", "512", "pp", "pp0", "pp1.5k", "pp1m", "pp5@8", "pp5,"]
)
def test_what_is_no_case(wrong):
    with pytest.raises(ConfigError, match="pp512@d8192"):
        parse_cases(wrong)


def test_modes():
    assert parse_modes("contended, cold") == ["cold", "contended"]
    with pytest.raises(ConfigError, match="cold, memory, disk, contended"):
        parse_modes("warm")


def test_modes_that_fit():
    every = parse_modes("cold,memory,disk,contended")
    assert Case(512).modes(every) == ["cold", "contended"]
    assert Case(512, 64).modes(every) == ["memory", "disk", "contended"]
    assert Case(512).modes(["memory"]) == []
