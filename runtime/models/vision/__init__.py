"""Images on the device: image encoders, and image embeddings for language models."""
