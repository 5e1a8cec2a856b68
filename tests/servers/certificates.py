"""Certificates of a root that only the tests know."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """The certificate of a server on this machine, in files, and its root."""

    folder: Path
    root: trustme.CA

    @classmethod
    def made_in(cls, folder: Path) -> Certificates:
        root = trustme.CA()
        issued = root.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(folder / "key.pem")
        for blob in issued.cert_chain_pems:
            blob.write_to_path(folder / "cert.pem", append=True)
        root.cert_pem.write_to_path(folder / "roots.pem")
        return cls(folder, root)

    @property
    def settings(self) -> dict[str, Path]:
        """Settings of `ServerConfig`."""
        return {"tls_cert": self.folder / "cert.pem", "tls_key": self.folder / "key.pem"}

    @property
    def roots(self) -> Path:
        """File of the root, for clients."""
        return self.folder / "roots.pem"

    def trusting(self, *protocols: str, certificate: bool = False) -> ssl.SSLContext:
        """Context of a client that trusts the root.

        Args:
            protocols: Those that it offers in the handshake (ALPN).
            certificate: It shows a certificate of its own.
        """
        context = ssl.create_default_context()
        self.root.configure_trust(context)
        if certificate:
            self.root.issue_cert("client@test").configure_cert(context)
        if protocols:
            context.set_alpn_protocols(protocols)
        return context
