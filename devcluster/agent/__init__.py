"""What a cloud and kube-proxy do for a cluster: node addresses, Services. Runs beside the control plane."""
