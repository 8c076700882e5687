"""Writes dashboards/*.json: `python deploy/grafana/build_dashboards.py` (needs `pip install -e ".[dev]"`)."""

from __future__ import annotations

from boards.boards import FOLDER, render

if __name__ == "__main__":
    for name, text in render().items():
        (FOLDER / name).write_text(text)
