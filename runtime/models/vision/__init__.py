"""Images on the device: their encoders, and language models that read them."""
