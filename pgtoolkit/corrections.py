"""The corrections for the gap between sampler and trainer, as `pgtoolkit.corrections`.

It is another name of the module in `losses/`.
"""

import sys

from pgtoolkit.losses import corrections

sys.modules[__name__] = corrections
