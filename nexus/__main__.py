"""`python -m nexus`: the command line."""

import sys

from nexus.cli import main

sys.exit(main())
