"""Tensors that are not dense, without what PyTorch warns of while it makes them."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


def nested(tensors: list[Tensor], layout: torch.layout) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor(tensors, layout=layout)


def sparse_csr(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta
        return tensor.to_sparse_csr()
