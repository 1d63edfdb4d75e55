"""What the tests of models share: compiled code without a compiler."""

from collections.abc import Iterator

import pytest
from builders.uncompiled import uncompiled_functions


@pytest.fixture(scope="module")
def uncompiled() -> Iterator[None]:
    """Compile nothing, to the end of a module."""
    with uncompiled_functions():
        yield
