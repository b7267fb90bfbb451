"""Dashboard and alerts of the chart, generated: `python -m monitoring` writes them into helm/everloop/monitoring."""
