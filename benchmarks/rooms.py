"""Draw the rooms in docs/architecture.md from the imports: `python -m benchmarks.rooms`.

With the name of a room, `python -m benchmarks.rooms losses`, list its files with their purposes
instead. A room is a folder of `pgtoolkit/`. The files beside the rooms are left out. An arrow goes
from a room to each room that it imports, unless a longer path already leads there. The purpose of a
room or a file is the first sentence of its docstring.
"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pgtoolkit"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- rooms -->\n"
END = "<!-- end -->\n"


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def purpose(file: Path) -> str:
    """Return the first paragraph of a file's docstring, as one line."""
    docstring = ast.get_docstring(parsed(file)) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def imported_rooms(room: str, rooms: set[str]) -> set[str]:
    """Return the other rooms that the files of `room` import, also within functions."""
    imported = set()
    for file in (PACKAGE / room).rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            imported |= {name.split(".")[1] for name in names if name.startswith("pgtoolkit.")}
    return imported & rooms - {room}


def reachable(room: str, arrows: dict[str, set[str]]) -> set[str]:
    """Return every room that a path of arrows leads to from `room`."""
    rooms = set()
    for below in arrows[room]:
        rooms |= {below} | reachable(below, arrows)
    return rooms


def picture() -> str:
    """Return the rooms and the arrows between them as a diagram in Mermaid's language."""
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    arrows = {room: imported_rooms(room, rooms) for room in rooms}
    lines = []
    for room in sorted(rooms):
        text = purpose(PACKAGE / room / "__init__.py").removesuffix(".")
        lines.append(f'  {room}["<b>{room}</b><br>{text}"]\n')
    for room in sorted(rooms):
        by_longer_paths = set()
        for below in arrows[room]:
            by_longer_paths |= reachable(below, arrows)
        lines += [f"  {room} --> {below}\n" for below in sorted(arrows[room] - by_longer_paths)]
    return "```mermaid\nflowchart TD\n" + "".join(lines) + "```\n"


def with_picture(page: str) -> str:
    """Return the page with the picture between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + picture() + END + after


if __name__ == "__main__":
    if sys.argv[1:]:
        for path in sorted((PACKAGE / sys.argv[1]).rglob("*.py")):
            print(f"{path.relative_to(PACKAGE / sys.argv[1])!s:28} {purpose(path)}")
    else:
        PAGE.write_text(with_picture(PAGE.read_text()))
