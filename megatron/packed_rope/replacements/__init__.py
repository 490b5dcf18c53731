"""What upstream names are bound to: one module per upstream module.

Each factory takes the upstream module and the definition found there, and returns the function
that takes its place; it carries upstream's own name, so pickles and tracebacks keep working.
Nothing here imports Megatron: when a patched file ends, megatron.core is only partly imported.
"""
