"""``python -m torchrelay.compat script.py ...``: run a script with all compat modules installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torchrelay.compat import install, install_in_children, names, script_path


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(
            "usage: python -m torchrelay.compat script.py [arguments]\nprovides: "
            f"{', '.join(names())}"
        )
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    install(unless_in=script_path())
    install_in_children()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
