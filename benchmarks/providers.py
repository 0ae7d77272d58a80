"""Whoever computes log-probabilities: one row each, prepared for a case or Unavailable.

A prepared provider offers, by buffer number, `forward(i)` (no gradient) -> logp, `backward(i)` ->
the gradient at the logits of ``(grad_logp * logp).sum()``, and `step(i)`, both together through
autograd. What a provider lacks is None. Losses (minus logp) carry ``sign`` -1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_logp_hub
from benchmarks import loading
from benchmarks.case import Case
from benchmarks.loading import Unavailable
from fused_logp_hub import _driver

Call = Callable[[int], Tensor]


@dataclass
class Calls:
    """A provider prepared for a case."""

    forward: Call | None = None
    backward: Call | None = None
    step: Call | None = None
    sign: float = 1.0


@dataclass(frozen=True)
class Provider:
    """One row of the table; names.py says what it is."""

    name: str
    prepare: Callable[[Case], Calls]
    jit: bool = False
    """Compiles for seconds per shape, so it runs only on shapes that ask for it."""
    rounded: bool = False
    """Returns logp in the logits' dtype, so it is checked at that dtype's precision."""


def through_autograd(case: Case, function: Callable[[Tensor], Tensor], sign: float = 1.0) -> Calls:
    """Calls for a differentiable function of the logits; each buffer's graph is built once."""
    upstream = case.grad_logp * sign
    graphs: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return function(case.logits[i])

    def backward(i: int) -> Tensor:
        if i not in graphs:
            leaf = case.leaf(i)
            graphs[i] = leaf, function(leaf)
        leaf, out = graphs[i]
        return torch.autograd.grad(out, leaf, upstream.to(out.dtype), retain_graph=True)[0]

    def step(i: int) -> Tensor:
        leaf = case.leaf(i)
        out = function(leaf)
        return torch.autograd.grad(out, leaf, upstream.to(out.dtype))[0]

    return Calls(forward, backward, step, sign)


def flat(case: Case) -> None:
    """Unavailable unless the case's logits are [N, V], as cross-entropy functions take them."""
    if case.logits[0].dim() != 2:
        raise Unavailable("takes [N, V] only: these logits would be copied first")


def _eager_function(case: Case) -> Callable[[Tensor], Tensor]:
    ids, mask = case.token_ids.unsqueeze(-1), case.row_mask

    def eager(logits: Tensor) -> Tensor:
        logp = torch.log_softmax(logits.float(), -1).gather(-1, ids).squeeze(-1)
        return logp if mask is None else logp.masked_fill(~mask, 0.0)

    return eager


def _eager(case: Case) -> Calls:
    return through_autograd(case, _eager_function(case))


def _compile(case: Case) -> Calls:
    import torch._functorch.config

    # A graph that is differentiated many times keeps what it saved.
    torch._functorch.config.donated_buffer = False
    torch._dynamo.reset()  # one shape's recompilations do not count against the next one's limit
    return through_autograd(case, torch.compile(_eager_function(case), dynamic=False))


def _trl_torch(case: Case) -> Calls:
    namespace = {"torch": torch, "F": F, "is_triton_available": lambda: False}
    function = loading.load_function("trl", "trainer/utils.py", "selective_log_softmax", namespace)
    rows = case.shape.rows
    # It loops over the first dimension, which is TRL's batch of completions.
    batch = case.shape.sequences if case.logits[0].dim() == 3 else 8 if rows % 8 == 0 else 1
    leading = (batch, rows // batch)
    ids = case.token_ids.reshape(leading)
    mask = None if case.row_mask is None else case.row_mask.reshape(leading)

    def call(logits: Tensor) -> Tensor:
        out = function(logits.view(*leading, logits.shape[-1]), ids, row_mask=mask)
        return out.view(case.token_ids.shape)

    return through_autograd(case, call)


def _trl_triton(case: Case) -> Calls:
    function = loading.load_file("trl", "kernels/logprob_entropy.py").selective_log_softmax_and_entropy
    return through_autograd(case, lambda logits: function(logits, case.token_ids, row_mask=case.row_mask)[0])


def _liger(case: Case) -> Calls:
    function = loading.load_file("liger_kernel", "ops/grpo_loss.py").fused_selective_log_softmax
    shape = (case.shape.sequences, -1)
    ids = case.token_ids.reshape(shape)
    mask = None if case.row_mask is None else case.row_mask.reshape(shape)
    # It drops the last row of each sequence itself.
    return Calls(lambda i: function(case.bases[i], ids, temperature=1.0, mask=mask).view(case.token_ids.shape))


def _flash_attn(case: Case) -> Calls:
    flat(case)
    function = loading.load_file("flash_attn", "ops/triton/cross_entropy.py").cross_entropy_loss
    labels = case.labels
    return through_autograd(case, lambda logits: function(logits, labels)[0], sign=-1.0)


def _quack(case: Case) -> Calls:
    flat(case)
    loading.package_file("quack", "cross_entropy.py")
    loading.import_cutlass()
    from quack.cross_entropy import cross_entropy, cross_entropy_bwd, cross_entropy_fwd

    labels, upstream = case.labels, -case.grad_logp
    lse: list[Tensor] = []

    def backward(i: int) -> Tensor:
        if not lse:  # the same for every buffer, since they hold the same values
            lse.append(cross_entropy_fwd(case.logits[0], labels, return_lse=True)[1])
        return cross_entropy_bwd(case.logits[i], labels, upstream, lse[0])

    def step(i: int) -> Tensor:
        leaf = case.leaf(i)
        out = cross_entropy(leaf, labels, reduction="none")
        return torch.autograd.grad(out, leaf, upstream)[0]

    return Calls(
        lambda i: cross_entropy_fwd(case.logits[i], labels, return_lse=True)[0],
        backward,
        step,
        -1.0,
    )


def _ours(kernel: str) -> Callable[[Case], Calls]:
    def prepare(case: Case) -> Calls:
        ids, mask = case.token_ids, case.row_mask
        if fused_logp_hub.explain_selection(case.logits[0], kernel=kernel).kernel is None:
            raise Unavailable(f"no {kernel} kernel fits these tensors")
        calls = through_autograd(
            case,
            lambda logits: fused_logp_hub.fused_logp(logits, ids, row_mask=mask, kernel=kernel),
        )
        calls.backward = None
        if kernel != "auto":  # there is one backward
            return Calls(calls.forward)
        saved = fused_logp_hub.fused_logp(case.logits[0].detach(), ids, row_mask=mask, return_lse=True)
        calls.backward = lambda i: fused_logp_hub.fused_logp_backward(
            case.grad_logp, case.logits[i], ids, saved.row_max, saved.log_sum, row_mask=mask
        )
        return calls

    return prepare


PROVIDERS = (
    Provider("eager", _eager),
    Provider("torch.compile", _compile, jit=True),
    Provider("trl-torch", _trl_torch, rounded=True),
    Provider("trl-triton", _trl_triton),
    Provider("liger", _liger),
    Provider("flash-attn", _flash_attn),
    Provider("quack", _quack),
    Provider("ours", _ours("auto")),
    Provider("ours-online", _ours("online")),
    Provider("ours-tma", _ours("tma")),
    Provider("ours-two_pass", _ours("two_pass")),
)
DRY = ("eager", "ours")


def select(names: list[str]) -> list[Provider]:
    """The providers of these names; all without names."""
    known = {p.name: p for p in PROVIDERS}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise ValueError(
            f"--providers: expected some of {', '.join(known)}, got {', '.join(unknown)}. Correct the name."
        )
    return [p for p in PROVIDERS if not names or p.name in names]


@contextlib.contextmanager
def recorded_symbols() -> Iterator[list[str]]:
    """The symbols of our kernels that are launched inside, read where they are launched."""
    symbols: list[str] = []
    original = _driver.Function.launch

    def launch(self: _driver.Function, *arguments: object) -> None:
        symbols.append(self.kernel.symbol)
        original(self, *arguments)  # type: ignore[arg-type]

    _driver.Function.launch = launch  # type: ignore[method-assign]
    try:
        yield symbols
    finally:
        _driver.Function.launch = original  # type: ignore[method-assign]
