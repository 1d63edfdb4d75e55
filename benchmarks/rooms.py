"""Draws the rooms in docs/architecture.md from the imports: `python -m benchmarks.rooms` does it
anew.

A room is a folder of `pgtoolkit/`. The files beside the rooms are left out. An arrow goes from a
room to each that it imports, unless a longer way leads there already. What is said of a room is its
line in the page's list of files.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pgtoolkit"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- rooms -->\n"
END = "<!-- end -->\n"


def imported_rooms(room: str, rooms: set[str]) -> set[str]:
    """Return the other rooms that the files of `room` import, within functions and for types
    too."""
    imported = set()
    for file in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            imported |= {name.split(".")[1] for name in names if name.startswith("pgtoolkit.")}
    return imported & rooms - {room}


def reachable(room: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return every room that a way of arrows leads to from `room`."""
    rooms = set()
    for below in arrows[room]:
        rooms |= {below} | reachable(below, arrows)
    return rooms


def picture(page: str) -> str:
    """Return the rooms and the arrows between them as a diagram in Mermaid's language."""
    purposes = dict(re.findall(r"^  (\w+)/ +(.*)$", page, flags=re.MULTILINE))
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    arrows = {room: imported_rooms(room, rooms) for room in rooms}
    lines = [f'  {room}["<b>{room}</b><br>{purposes[room]}"]\n' for room in sorted(rooms)]
    for room in sorted(rooms):
        by_longer_ways = set()
        for below in arrows[room]:
            by_longer_ways |= reachable(below, arrows)
        lines += [f"  {room} --> {below}\n" for below in sorted(arrows[room] - by_longer_ways)]
    return "```mermaid\nflowchart TD\n" + "".join(lines) + "```\n"


def with_picture(page: str) -> str:
    """Return the page with the picture between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + picture(page) + END + after


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text()))
