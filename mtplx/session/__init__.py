"""The SessionBank: KV state kept by token prefix."""

from mtplx.session.bank import SessionBank
from mtplx.session.lease import Lease
from mtplx.session.match import Lookup, Match

__all__ = ["Lease", "Lookup", "Match", "SessionBank"]
