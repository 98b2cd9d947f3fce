"""The processes that run models, and what passes between them and the daemon."""

__all__: list[str] = []
