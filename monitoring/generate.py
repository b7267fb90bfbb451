"""Panels and alerts -> the documents that Grafana and the Prometheus Operator read."""

from __future__ import annotations

from typing import Any

from monitoring.alerts import ALERTS, Alert
from monitoring.panels import ROWS, Panel

RUNBOOKS = "docs/runbooks.md"
COLUMNS, WIDTH, HEIGHT = 24, 8, 8
"""Of Grafana's grid."""
SOURCE = {"type": "prometheus", "uid": "${source}"}


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row.title, "id": len(panels) + 1, "gridPos": place, "panels": []})
        top += 1
        for index, panel in enumerate(row.panels):
            left = index * WIDTH % COLUMNS
            if index and not left:
                top += HEIGHT
            panels.append(_panel(panel, len(panels) + 1, left, top))
        top += HEIGHT
    return {
        "title": "Everloop",
        "uid": "everloop",
        "tags": ["everloop"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": left, "y": top, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


def alerts() -> dict[str, Any]:
    """The groups of rules, as Prometheus reads them from a file and from a PrometheusRule."""
    return {"groups": [{"name": "everloop", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": "critical" if alert.critical else "warning"},
        "annotations": {"summary": alert.summary, "runbook": f"{RUNBOOKS}#{alert.name.lower()}"},
    }
