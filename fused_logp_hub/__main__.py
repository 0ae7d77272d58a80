"""``python -m fused_logp_hub`` is the command ``fused-logp-hub``."""

import sys

from fused_logp_hub.cli import main

if __name__ == "__main__":
    sys.exit(main())
