"""The real `forewarn` command with fake collectors in its registry; tests start it as a process of its own."""

from __future__ import annotations

import sys

from forewarn.collectors import registry
from forewarn.daemon import cli

registry.COLLECTORS.clear()
registry.COLLECTORS.update(lines="fakes_agent:LineCollector", hung="fakes_agent:HungCollector")

if __name__ == "__main__":
    sys.exit(cli.main())
