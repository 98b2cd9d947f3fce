"""``python -m torchrelay``: the command, where its script is not on the path."""

from torchrelay.cli import main

main()
