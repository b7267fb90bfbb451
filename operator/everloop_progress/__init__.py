"""The progress reader: a sidecar of a driver pod that reads what the driver reports and tells it to the operator."""
