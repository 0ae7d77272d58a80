"""Forward and backward captured as a CUDA graph and replayed on new data. Without a GPU the step runs uncaptured."""

import torch

from fused_logp_hub import fused_logp, preload


def step(logits, token_ids, grad_logp):
    """What is captured: log-probabilities of [N, V] logits, and the gradient."""
    logp = fused_logp(logits, token_ids, temperature=0.7)
    (gradient,) = torch.autograd.grad(logp, logits, grad_logp)
    return logp.detach(), gradient


def capture(function):
    """The function as a CUDA graph: a callable that replays it and returns the same tensors, filled anew."""
    preload()  # a capture may not load kernels
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # PyTorch's own first-time work, outside the graph
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()

    def replay():
        graph.replay()
        return results

    return replay


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows, vocab_size = 64, 32000

    # A graph reads and writes the same memory each time: new data is copied into these.
    logits = torch.zeros(rows, vocab_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    token_ids = torch.zeros(rows, device=device, dtype=torch.int64)
    grad_logp = torch.ones(rows, device=device)

    def run():
        return step(logits, token_ids, grad_logp)

    if device == "cuda":
        run = capture(run)
        print("captured; the lines below are replays")
    else:
        print("no GPU, so there is nothing to capture; the lines below are plain calls")

    for batch in range(3):
        with torch.no_grad():
            logits.copy_(torch.randn(rows, vocab_size))
        token_ids.copy_(torch.randint(vocab_size, (rows,)))
        logp, gradient = run()

        exact = torch.log_softmax(logits.detach().double() / 0.7, -1).gather(-1, token_ids[:, None])[:, 0]
        error, norm = (logp - exact).abs().max(), gradient.float().norm()
        print(f"batch {batch}: mean logp {logp.mean():.3f}, error {error:.0e}, gradient norm {norm:.3f}")
        assert error < 1e-5 + 1e-6 * exact.abs().max()


if __name__ == "__main__":
    main()
