"""What one thread of the switcher owns: requests, models, workers, and the arena's contents."""

__all__: list[str] = []
