"""Preprocessing of videos: decoding, choice of frames, resizing, and cutting into patches of two frames."""
