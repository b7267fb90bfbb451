"""What should happen to an RLJob: pure functions over plain values, as for a TrainingSession."""
