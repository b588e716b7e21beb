"""Start a training run of RLinf on remote environments; see ``plugrl_bridges.rlinf.launcher``."""

from __future__ import annotations

from plugrl_bridges.rlinf.launcher import main

if __name__ == "__main__":
    main()
