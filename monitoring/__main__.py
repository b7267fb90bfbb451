"""`python -m monitoring`: writes the chart's dashboard and alerts."""

from __future__ import annotations

import json
from pathlib import Path

from monitoring import generate

CHART = Path(__file__).resolve().parent.parent / "helm" / "everloop" / "monitoring"
FILES = {"dashboard.json": generate.dashboard, "alerts.json": generate.alerts}


def texts() -> dict[str, str]:
    """Name -> content of each file."""
    return {name: json.dumps(make(), indent=1) + "\n" for name, make in FILES.items()}


def main() -> None:
    """The command."""
    CHART.mkdir(exist_ok=True)
    for name, text in texts().items():
        (CHART / name).write_text(text)


if __name__ == "__main__":
    main()
