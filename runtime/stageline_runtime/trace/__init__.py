"""Timelines of a group's stages on one axis: collected, summed up, written for Perfetto, drawn. Free of torch."""
