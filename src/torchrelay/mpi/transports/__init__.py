"""What moves bytes between the ranks of a communicator, behind the contract of ``_transport``."""

__all__: list[str] = []
