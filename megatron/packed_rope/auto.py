"""``import megatron.packed_rope.auto``, first thing in a script: bind upstream in this process.

For installs that cannot be changed on disk, and for trials. Nothing is written; a plain subprocess
starts unpatched unless it imports this too (``python -m megatron.packed_rope apply`` covers every
process). See ``binding/hook.py``.
"""

from .binding.hook import install

install()
