"""Run the env client as ``python -m plugrl_bridges.client``; see ``cli``."""

from __future__ import annotations

from plugrl_bridges.client.cli import main

if __name__ == "__main__":
    main()
