"""What moves the bytes of a save or load, in the trainer or in the writer process."""

__all__: list[str] = []
