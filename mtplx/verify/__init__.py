"""The self-test: every way to a prompt's state computes what one pass computes."""

from mtplx.verify.checks import Check, Flip, Verdict
from mtplx.verify.run import LEAST_TOKENS, verify

__all__ = ["LEAST_TOKENS", "Check", "Flip", "Verdict", "verify"]
