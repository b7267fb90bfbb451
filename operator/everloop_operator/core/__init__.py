"""What should happen: pure functions over plain values. No client, no clock, no environment."""
