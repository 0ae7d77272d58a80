"""How far a call of `fused_logp` lies from float64 PyTorch on the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100


def compare(logits: Tensor, labels: Tensor, logp: Tensor) -> tuple[float, float]:
    """The errors of a forward and backward that have run.

    Args:
        logits: [..., V]; ``logits.grad`` is what the backward gave.
        labels: [...] int64, IGNORE or an id in [0, V).
        logp: [...]; ``logp.grad`` is the upstream gradient.

    Returns:
        The largest |difference| of logp, and the relative norm of the gradient's difference.
    """
    assert logits.grad is not None
    assert logp.grad is not None
    exact = logits.detach().double().requires_grad_()
    counted = labels != IGNORE
    wanted = exact.log_softmax(-1).gather(-1, labels.where(counted, 0)[..., None])[..., 0] * counted
    (gradient,) = torch.autograd.grad(wanted, exact, logp.grad.double())
    difference = (logits.grad - gradient).norm() / gradient.norm().clamp(min=1e-30)
    return (logp.detach() - wanted.detach()).abs().max().item(), difference.item()
