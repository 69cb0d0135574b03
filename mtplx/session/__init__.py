"""The SessionBank: KV state kept by token prefix."""

from mtplx.session.bank import Lease, SessionBank
from mtplx.session.match import Match

__all__ = ["Lease", "Match", "SessionBank"]
