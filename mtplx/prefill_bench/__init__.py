"""Measures how fast prompts are read: cold, warm, and beside running streams.

What is measured is a server as its clients see it, of ours in this process or any other
behind a URL, by the same code; so that figures can be compared.
"""

from mtplx.prefill_bench.cases import Case, Mode, parse_cases, parse_modes
from mtplx.prefill_bench.local import LocalTarget
from mtplx.prefill_bench.remote import RemoteTarget
from mtplx.prefill_bench.report import compare, conditions, machine, processor_name
from mtplx.prefill_bench.run import Row, measure
from mtplx.prefill_bench.targets import Target

__all__ = [
    "Case",
    "LocalTarget",
    "Mode",
    "RemoteTarget",
    "Row",
    "Target",
    "compare",
    "conditions",
    "machine",
    "measure",
    "parse_cases",
    "parse_modes",
    "processor_name",
]
