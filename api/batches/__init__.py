"""OpenAI's files and batches: a folder that keeps them, uploads to it, and the runs of batches."""
