"""The drawn table."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.picture import draw


def test_table_is_drawn_with_an_empty_cell(tmp_path: Path) -> None:
    """A cell that was not struck leaves the others as they are."""
    pictures = []
    for name, seconds in (("all", 2.0), ("other", 3.0)):
        path = tmp_path / "new" / f"{name}.png"
        draw(["engine", "etcd"], ["idle"], {("engine", "idle"): seconds}, path)
        pictures.append(path.read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
