"""The loss families, as `pgtoolkit.families`: another name of the module in `losses/`."""

import sys
from typing import TYPE_CHECKING

from pgtoolkit.losses import families

if TYPE_CHECKING:  # the same names for type checkers
    from pgtoolkit.losses.families import *  # noqa: F403
    from pgtoolkit.losses.family import Family as Family

sys.modules[__name__] = families
