"""From an encoded image to what the device reads: decoding, resizing, cutting into patches, scale."""
