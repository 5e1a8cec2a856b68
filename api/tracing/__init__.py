"""Traces: a span for each sampled request, its stages and its batches, exported by OpenTelemetry's SDK."""
