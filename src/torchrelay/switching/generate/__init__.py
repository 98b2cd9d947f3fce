"""Language models that generate: preempted between two tokens, their keys and values kept."""

__all__: list[str] = []
