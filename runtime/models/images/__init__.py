"""Preprocessing of images: decoding, resizing, cutting into patches, and scaling on the device."""
