"""The corrections for the gap between sampler and trainer, as `pgtoolkit.corrections`.

It is another name of the module in `losses/`.
"""

import sys
from typing import TYPE_CHECKING

from pgtoolkit.losses import corrections

if TYPE_CHECKING:  # the same names for type checkers
    from pgtoolkit.losses.corrections import *  # noqa: F403

sys.modules[__name__] = corrections
