"""The K3-style language model, written as megatron-core modules. Names no rank, stream or device."""
