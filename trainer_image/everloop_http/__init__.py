"""What gateway and session pod do alike with HTTP: each answers clients that it does not trust."""
