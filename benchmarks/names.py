"""What the providers are called in tables and charts, and what they are. No PyTorch here."""

from __future__ import annotations

# name in results.csv: (short label, what it is)
PROVIDERS = {
    "read": ("read limit", "a Triton kernel that only reads the same bytes"),
    "copy": ("copy limit", "Tensor.copy_ of the logits"),
    "ours": ("ours", "fused_logp and fused_logp_backward, kernel chosen automatically"),
    "ours-online": ("ours online", "fused_logp(kernel='online')"),
    "ours-tma": ("ours tma", "fused_logp(kernel='tma')"),
    "ours-two_pass": ("ours two_pass", "fused_logp(kernel='two_pass')"),
    "quack": ("QuACK", "quack-kernels' cross_entropy, with the log-sum-exp"),
    "liger": ("Liger", "liger-kernel's fused_selective_log_softmax; forward only"),
    "flash-attn": ("flash-attn", "flash-attn's Triton cross-entropy loss"),
    "trl-triton": ("TRL Triton", "TRL's Triton kernel, logp and entropy together"),
    "trl-torch": (
        "TRL torch",
        "TRL's selective_log_softmax without Triton; logp in the logits' dtype",
    ),
    "torch.compile": ("torch.compile", "the eager expression, compiled for the shape"),
    "eager": ("eager", "log_softmax(logits.float(), -1).gather(-1, ids)"),
    "least": (
        "least",
        "of host time: allocations and launches alone; for gradients, in a node of autograd written in Python",
    ),
}
LIMITS = ("read", "copy")
HOST_LIMIT = "least"
OURS = tuple(name for name in PROVIDERS if name.startswith("ours"))
LIBRARIES = ("quack", "liger", "flash-attn", "trl-triton", "trl-torch")


def label(provider: str) -> str:
    return PROVIDERS.get(provider, (provider, ""))[0]


def ordered(providers: list[str]) -> list[str]:
    """In the order above; unknown ones last."""
    order = list(PROVIDERS)
    return sorted(providers, key=lambda p: order.index(p) if p in order else len(order))
