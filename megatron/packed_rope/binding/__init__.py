"""How upstream names are bound: the catalogue, live, on disk, by import hook, in a wheel."""

from .live import rebind, require_active

__all__ = ["rebind", "require_active"]
