"""Lets JAX find the package where it is only on PYTHONPATH, not installed: JAX also looks through this namespace."""

from pathways_rs import initialize

__all__ = ["initialize"]
