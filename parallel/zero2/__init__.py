"""Pipeline ZeRO-2: gradient shards, and two full-size chunk buffers that rotate."""

SLOTS = 2
"""Full-size chunk buffers: one fills while the other is being summed."""
