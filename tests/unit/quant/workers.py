"""What one gloo process does for the tests of quantisation in the model."""

from __future__ import annotations

from itertools import chain

import torch

from tests.unit.model.workers import build


def compare_with_rounded_weights() -> dict[str, bool]:
    """Whether QAT gives the logits, bit for bit, of a plain model that holds the rounded weights."""
    from k3train.ops.packing import Packing
    from k3train.quant import mx
    from parallel.moonep import EXACT

    _, model = build("model.latent_size=32", "quant=mxfp4_qat", "quant.activation_format=none")
    model.eval()
    tokens = torch.randint(0, 256, (2, 37), generator=torch.Generator().manual_seed(3))
    layers = [moe.experts for _, moe in model.moe_layers()]
    found = {}
    with torch.no_grad():

        def logits() -> torch.Tensor:
            return model(tokens, Packing.from_tokens(tokens, 256))

        trained = logits()
        for experts in layers:
            for weight in chain(*experts.weights()):
                weight.copy_(mx.fake_quantise(weight, mx.MXFP4))
        found["rounded weights change nothing"] = torch.equal(logits(), trained)
        for experts in layers:
            experts.config.expert_codec = lambda: EXACT
        found["a plain model of them"] = torch.equal(logits(), trained)
        layers[0].weights()[0][0].mul_(1.1)
        found["another model"] = torch.equal(logits(), trained)
    return found
