"""Programs that the server is compared with: plain loops and naive servers."""
