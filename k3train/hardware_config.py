"""The `cluster.efficiency` section of the configuration: how much of a machine's peaks operators reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EfficiencyConfig:
    """Shares of a peak that operators reach, by class. Defaults say nothing of any machine."""

    dense_gemm: float = 0.4
    """Products of projections, feed-forward layers and the head, over `cluster.peak_tflops`."""
    grouped_gemm: float = 0.4
    """Products of routed experts."""
    kda_core: float = 0.4
    """Core of Kimi Delta Attention, by the FLOPs of its chunk form."""
    attention: float = 0.4
    """Core of Gated MLA, by the FLOPs of causal attention over one document."""
    newton_schulz: float = 0.4
    """Iterations of Muon."""
    memory: float = 1.0
    """Norms, activations and other operators bound by memory, over `cluster.memory_gbps`."""
    link: float = 1.0
    """Collectives within a link domain, over `cluster.link_gbps`."""
    network: float = 1.0
    """Collectives between link domains, over `cluster.network_gbps`."""
