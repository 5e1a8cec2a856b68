"""`Pool`, an engine for blocking programs and notebooks, in a thread of its own.

`engine_thread.py` owns the thread and its event loop. `calls.py` divides long or endless inputs between requests.
"""

if __name__ != "staged_pool.pool":
    raise ImportError("import staged_pool.pool, not " + __name__)

from staged_pool.pool.calls import ResultStream
from staged_pool.pool.pool import Pool

__all__ = ["Pool", "ResultStream"]
