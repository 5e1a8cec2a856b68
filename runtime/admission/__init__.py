"""Admission: requests are admitted or rejected by one account of what is inside."""
