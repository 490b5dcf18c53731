"""Installs ``megatron.packed_rope`` beside ``megatron.core``, with the patch catalogue inside it.

There is no ``megatron/__init__.py``: ``megatron`` is a namespace package that megatron-core,
megatron-bridge and others share, so the packages are listed here by name.
"""

from setuptools import setup

setup(
    packages=[
        "megatron.packed_rope",
        "megatron.packed_rope.binding",
        "megatron.packed_rope.check",
        "megatron.packed_rope.positions",
        "megatron.packed_rope.replacements",
        "megatron.packed_rope.patches",
    ],
    package_dir={"megatron.packed_rope.patches": "patches"},
    package_data={"megatron.packed_rope": ["py.typed"], "megatron.packed_rope.patches": ["*.toml"]},
)
