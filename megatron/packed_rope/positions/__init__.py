"""mRoPE position ids of packed rows; needs torch alone, so collators can call it too."""

from .packed import packed_position_ids

__all__ = ["packed_position_ids"]
