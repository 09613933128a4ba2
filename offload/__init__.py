"""Where bytes live: the activation manager and its tiers (device, host, peer, NVMe) belong here."""
