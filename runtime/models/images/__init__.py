"""From an encoded picture to what the device reads: decoding, resizing, cutting into patches, scale."""
