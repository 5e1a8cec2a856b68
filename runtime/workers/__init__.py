"""Worker processes for Python code that would hold the interpreter's lock, or may crash."""
