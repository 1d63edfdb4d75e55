"""The penalties against a frozen reference, as `pgtoolkit.kl`: another name of the module in
`losses/`."""

import sys
from typing import TYPE_CHECKING

from pgtoolkit.losses import kl

if TYPE_CHECKING:  # the same names for type checkers
    from pgtoolkit.losses.kl import *  # noqa: F403

sys.modules[__name__] = kl
