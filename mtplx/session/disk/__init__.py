"""The disk tier of the SessionBank: KV state that survives a restart."""

from mtplx.session.disk.tier import DiskTier
from mtplx.session.disk.values import Fetched, FetchedPiece, Piece

__all__ = ["DiskTier", "Fetched", "FetchedPiece", "Piece"]
