"""Hugging Face's files: where they lie, tensors read from and written to them. What they mean is in dsjax.models."""
