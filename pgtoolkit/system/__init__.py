"""The machine's files and processes, Python's imports, and text for the terminal."""
