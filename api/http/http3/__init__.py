"""HTTP/3 over QUIC."""
