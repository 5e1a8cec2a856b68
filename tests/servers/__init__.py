"""Servers of tests, in three kinds.

- `on_socket.serving`: a real server on a real socket, in the event loop of the test. It is for everything that depends
  on connections: framing, limits, clients that leave, TLS, HTTP/2, HTTP/3, shutdown. Blocking clients run it in a
  portal.
- `in_memory.serving_in_memory`: the ASGI application alone. It is for routes, logs and metrics.
- `process.ServerProcess`: a server in a process of its own, as a user starts it. It is for flags, signals, exit codes
  and memory.

Commands that end run with `in_process.invoke_command`, or in a process of their own with `process.run_command`.

The models of the first two are doubles that the test holds, or real ones that are loaded (`tiny_models`). Clients of
bytes and frames are in `byte_client`, `http2_client` and `http3_client`.
"""
