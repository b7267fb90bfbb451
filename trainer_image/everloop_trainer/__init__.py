"""The trainer image: supervisor, server, journal and engine of one TrainingSession pod."""
