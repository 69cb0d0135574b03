"""The SessionBank: KV state kept by token prefix."""

from mtplx.session.bank import Lease, Match, SessionBank

__all__ = ["Lease", "Match", "SessionBank"]
