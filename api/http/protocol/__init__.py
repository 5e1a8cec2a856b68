"""Parts that the versions of HTTP share: request heads, bodies, streams and content codings."""
