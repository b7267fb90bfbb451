"""The metrics port, which operator and gateway have alike."""
