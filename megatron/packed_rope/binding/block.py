"""The marked block at the end of a patched upstream file: made, found and taken out again.

Everything works on bytes, so that taking a block out gives back the very file it was put into,
whatever its encoding, line ends or missing final newline.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from .. import __version__

_BEGIN = b"# >>> megatron-packed-rope"
_END = b"# <<< megatron-packed-rope"
_PATTERN = re.compile(
    rb"^" + re.escape(_BEGIN) + rb" (?P<version>\S+) sha256:(?P<sha256>[0-9a-f]{64})"
    rb"(?P<newline> newline-added)?[^\n]*\n.*?^" + re.escape(_END) + rb"[^\n]*\n?",
    re.MULTILINE | re.DOTALL,
)

_TEXT = """\
# >>> megatron-packed-rope {version} sha256:{sha256}{newline}
# Added by `python -m megatron.packed_rope apply`; `... revert` takes it out, and so does deleting
# these lines. It binds the packed (THD) RoPE functions of megatron.packed_rope in this module.
try:
    from megatron.packed_rope.binding import rebind as _packed_rope_rebind
except ImportError as _packed_rope_error:
    raise RuntimeError(
        f"{{__file__}} was patched by megatron-packed-rope, which cannot be imported now. Install "
        "megatron-packed-rope {version} again, from where it came, or take the patch out: with "
        "`python -m megatron.packed_rope revert` while it is installed, or by deleting the block "
        "between '>>> megatron-packed-rope' and '<<< megatron-packed-rope' in each patched file."
    ) from _packed_rope_error
_packed_rope_rebind(__name__)
# <<< megatron-packed-rope
"""


@dataclass(frozen=True)
class Stripped:
    """A file's content without the block, and what the block said."""

    content: bytes
    version: str | None
    """Version that wrote the block; None if there was no block."""
    as_patched: bool
    """Whether the content is the very one the block was added to."""


def add_block(content: bytes) -> bytes:
    """The content with the block at its end; ``content`` must not hold one already."""
    line_end = b"\r\n" if b"\r\n" in content else b"\n"
    newline = b"" if not content or content.endswith(b"\n") else line_end
    text = _TEXT.format(
        version=__version__,
        sha256=hashlib.sha256(content).hexdigest(),
        newline=" newline-added" if newline else "",
    )
    return content + newline + text.encode("ascii").replace(b"\n", line_end)


def strip_block(content: bytes) -> Stripped:
    """The content without the block, byte for byte what ``add_block`` was given."""
    match = _PATTERN.search(content)
    if match is None:
        return Stripped(content, None, True)
    before = content[: match.start()]
    if match["newline"]:
        before = before.removesuffix(b"\n").removesuffix(b"\r")
    original = before + content[match.end() :]
    return Stripped(
        content=original,
        version=match["version"].decode(),
        as_patched=hashlib.sha256(original).hexdigest().encode() == match["sha256"],
    )
