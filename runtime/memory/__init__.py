"""Memory: the budget of requests, and the governor of the process's real use."""
