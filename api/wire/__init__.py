"""Bodies of requests and answers: the JSON, forms, images and encodings that all dialects share."""
