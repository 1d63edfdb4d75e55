"""Makes `python -m pgtoolkit` the command `pgtk`."""

import sys

from pgtoolkit.command import main

if __name__ == "__main__":
    sys.exit(main())
