"""Workers that start fast, for every test here."""

from serving import preloaded_workers

__all__ = ["preloaded_workers"]
