"""From texts, pairs and conversations to token ids, in many threads at once."""
