"""The four stages and the values that travel between them. Imports no torch and no HTTP."""

if __name__ != "staged_pool.stages":  # imported by the bare name of its folder, every class would exist twice
    raise ImportError("import staged_pool.stages, not stages")
