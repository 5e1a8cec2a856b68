"""Several processes of one server: fronts, an engine process, and the supervisor over them."""
