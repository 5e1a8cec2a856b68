"""HTTP/3 over QUIC, on aioquic."""
