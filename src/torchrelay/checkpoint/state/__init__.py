"""The state to save or load: its leaves, its tensors, and the objects that have state dicts."""

__all__: list[str] = []
