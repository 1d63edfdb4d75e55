"""Which completions of a step are kept to be looked at."""

from pgtoolkit.runs.completions import CompletionRow, read_completions, write_completions  # noqa: F401
