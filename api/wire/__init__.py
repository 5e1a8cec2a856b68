"""The bodies of requests and answers: JSON, forms, images, numbers and lines that all dialects share."""
