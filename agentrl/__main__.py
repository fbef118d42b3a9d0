"""``python -m agentrl``: the ``agentrl`` command."""

import sys

from agentrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
