"""Read model folders: what their files say, one module a kind of model. No weights are loaded here."""
