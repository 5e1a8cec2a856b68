"""Admission: one account of the requests in flight, by which new ones are admitted or rejected."""
