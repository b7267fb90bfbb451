"""Fills the model cache, a volume, with a base model from Hugging Face or S3, before the trainer starts."""
