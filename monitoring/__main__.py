"""`python -m monitoring`: writes the chart's dashboard and alerts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monitoring import generate

CHART = Path(__file__).resolve().parent.parent / "helm" / "everloop" / "monitoring"
FILES = {"dashboard.json": generate.dashboard, "alerts.json": generate.alerts}


def texts() -> dict[str, str]:
    """Name -> content of each file."""
    return {name: _text(make()) for name, make in FILES.items()}


def _text(document: dict[str, Any]) -> str:
    """JSON with each panel, and each group of alerts, on a line of its own."""
    parts = []
    for key, value in document.items():
        lines = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f' "{key}": ' + (f"[\n  {lines}\n ]" if lines else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    """The command."""
    CHART.mkdir(exist_ok=True)
    for name, text in texts().items():
        (CHART / name).write_text(text)


if __name__ == "__main__":
    main()
