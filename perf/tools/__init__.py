"""Servers, load generators, inputs and reports, which the measurements share."""
