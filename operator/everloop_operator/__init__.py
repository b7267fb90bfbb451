"""The Everloop operator: turns TrainingSessions into session pods and replaces them when they are lost."""
