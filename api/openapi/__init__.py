"""The description of the HTTP routes: what `/openapi.json` says, made of the types that read the bodies."""
