"""What lies in a checkpoint, ours or of others: manifests, headers, values."""

__all__: list[str] = []
