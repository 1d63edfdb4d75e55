"""The loss families, as `pgtoolkit.families`: another name of the module in `losses/`."""

import sys

from pgtoolkit.losses import families

sys.modules[__name__] = families
