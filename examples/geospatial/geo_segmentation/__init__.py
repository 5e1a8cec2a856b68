"""Segmentation of satellite images: GeoTIFFs in, a georeferenced mask out."""
