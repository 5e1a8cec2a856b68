"""The ASGI application: routes, tasks, choice of the engine, metrics, and answers to problems."""
