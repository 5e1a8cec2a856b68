"""OpenAPI description of the HTTP routes, made from the types that decode the bodies."""
